"""Sizes and prompts of every workload, on a CPU, on a GPU and for tests."""

import random
from dataclasses import dataclass
from typing import Any

from cb_rollout.tools import bench
from cb_rollout.tools.bench import QWEN3_SMALLEST, SEED, SMALL_SHAPE, Workload, random_prompts

EOS = 1


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model and of each workload."""

    shape: dict[str, Any]
    """Arguments of `AutoConfig.for_model`."""
    prompt_tokens: tuple[int, int]
    """Shortest and longest prompt."""
    num_prompts: int = 16
    num_completions: int = 8
    """Completions of each prompt."""
    log_mean_tokens: float
    """Mean of the logarithm of a long-tailed length; its standard deviation is 0.9."""
    longest: int
    """Maximum of a long-tailed length, in tokens."""
    equal_tokens: int = 64
    """Length of every completion with equal lengths."""

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_completions


CPU = Sizes(shape=SMALL_SHAPE, prompt_tokens=(20, 60), log_mean_tokens=3.6, longest=512)

GPU = Sizes(shape=QWEN3_SMALLEST, prompt_tokens=(256, 512), log_mean_tokens=6.0, longest=4096)

# SmolLM-135M, with few tokens: one repetition of `rollout` takes about ten minutes on two cores.
LLAMA_135M = Sizes(
    shape={
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "intermediate_size": 1536, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    prompt_tokens=(20, 60), num_prompts=8, log_mean_tokens=3.2, longest=256, equal_tokens=40,
)  # fmt: skip

# Sizes by the name of the command line's `--model`, and the name for each device without it.
MODELS = {"small": CPU, "135m": LLAMA_135M, "0.6b": GPU}
DEFAULT_MODELS = {"cpu": "small", "cuda": "0.6b"}

# For tests: figures of these sizes mean nothing.
TINY = Sizes(
    shape={
        "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 48, "tie_word_embeddings": True,
    },
    prompt_tokens=(2, 4), num_prompts=2, num_completions=2, log_mean_tokens=1.0, longest=6,
    equal_tokens=4,
)  # fmt: skip


def long_tailed(sizes: Sizes) -> Workload:
    """Return groups of completions with long-tailed lengths, as in a rollout of training."""
    return bench.long_tailed(
        sizes.shape["vocab_size"],
        sizes.num_prompts,
        sizes.prompt_tokens,
        sizes.log_mean_tokens,
        sizes.longest,
        sizes.num_completions,
    )


def equal_lengths(sizes: Sizes) -> Workload:
    """Return distinct prompts with completions of one length: the best case of a fixed batch."""
    count = sizes.num_sequences
    prompts = random_prompts(
        random.Random(SEED), count, sizes.prompt_tokens, sizes.shape["vocab_size"]
    )
    return Workload(prompts, [sizes.equal_tokens] * count)
