"""Sizes, random models and prompts of every workload, on a CPU, on a GPU and for tests.

A completion is forced to have its number of tokens.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SEED = 0
EOS = 1

# Qwen3-0.6B.
QWEN3_SMALLEST: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip


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


CPU = Sizes(
    shape={
        "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
        "intermediate_size": 768, "tie_word_embeddings": True,
    },
    prompt_tokens=(20, 60), log_mean_tokens=3.6, longest=512,
)  # fmt: skip

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


@dataclass(frozen=True)
class Workload:
    """Prompts, and the number of tokens that each completion is forced to have."""

    prompts: list[list[int]]
    """One prompt for each completion; equal neighbours form a group."""
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def random_prompts(
    draws: random.Random, count: int, tokens: tuple[int, int], vocab_size: int
) -> list[list[int]]:
    """Return prompts of random ids, with lengths uniform between the two of `tokens`."""
    return [
        [draws.randrange(2, vocab_size) for _ in range(draws.randint(*tokens))]
        for _ in range(count)
    ]


def long_tailed_lengths(
    draws: random.Random, count: int, log_mean: float, longest: int
) -> list[int]:
    """Return completion lengths as in training: most short, a few very long."""
    return [min(longest, max(1, int(draws.lognormvariate(log_mean, 0.9)))) for _ in range(count)]


def long_tailed(sizes: Sizes) -> Workload:
    """Return groups of completions with long-tailed lengths, as in a rollout of training."""
    draws = random.Random(SEED)
    prompts = random_prompts(
        draws, sizes.num_prompts, sizes.prompt_tokens, sizes.shape["vocab_size"]
    )
    return Workload(
        [prompt for prompt in prompts for _ in range(sizes.num_completions)],
        long_tailed_lengths(draws, sizes.num_sequences, sizes.log_mean_tokens, sizes.longest),
    )


def equal_lengths(sizes: Sizes) -> Workload:
    """Return distinct prompts with completions of one length: the best case of a fixed batch."""
    count = sizes.num_sequences
    prompts = random_prompts(
        random.Random(SEED), count, sizes.prompt_tokens, sizes.shape["vocab_size"]
    )
    return Workload(prompts, [sizes.equal_tokens] * count)


def create_model(shape: dict[str, Any], device: str, **overrides: Any) -> Any:
    """Create a model with random weights: float32 on a CPU, else bfloat16.

    `shape` and `overrides` are arguments of `AutoConfig.for_model`.
    """
    settings: dict[str, Any] = shape | {"eos_token_id": EOS, "pad_token_id": 0} | overrides
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(SEED)
    with torch.device(device):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
