"""How large everything is: on a CPU, on a GPU, and as small as can be."""

from dataclasses import dataclass
from typing import Any

SEED = 0
EOS = 1

QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
             "intermediate_size": 3072, "tie_word_embeddings": True},
    "4B": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
           "intermediate_size": 9728, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
           "intermediate_size": 12288, "tie_word_embeddings": False},
}  # fmt: skip
for _shape in QWEN3.values():
    _shape |= {
        "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model, and of each workload."""

    shape: dict[str, Any]
    """What `Qwen3Config` is told."""
    prompt_tokens: tuple[int, int]
    """Shortest and longest prompt."""
    num_prompts: int = 16
    num_completions: int = 8
    """Of each prompt, in a group."""
    log_mean_tokens: float
    """Mean of the logarithm of a long-tailed completion's length; its deviation is 0.9."""
    longest: int
    """Most tokens of such a completion."""
    equal_tokens: int = 64
    """Of every completion, where all are equally long."""
    sampled_mean: int = 50
    """Mean length where the model ends completions itself: steps and strategies."""
    longest_in_step: int = 256
    """Most tokens of a completion in a GRPO step."""
    strategy_steps: int = 4
    """Collections that are timed of each strategy."""
    scales: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    """Requests at once."""
    scaling_tokens: int = 32
    """Of every completion while scaling: few, since there may be 1,024."""
    num_waiting: tuple[int, ...] = (0, 100, 10_000)
    """Requests that wait while a decode step's bookkeeping is timed; memory is of the most."""
    bookkeeping_rows: int = 256
    """Sequences of that decode step."""
    num_syncs: int = 20
    """Weight syncs in one repetition."""
    truncated_rows: int = 16
    """Rows whose logits are truncated."""
    truncated_vocab: int = QWEN3["8B"]["vocab_size"]
    """Logits of each."""
    num_truncations: int = 5
    """Turns of each way to truncate them, in one repetition."""
    copied_bytes: int = 64 << 20
    """By the copy that measures bandwidth."""

    @property
    def num_sequences(self) -> int:
        """Of one rollout."""
        return self.num_prompts * self.num_completions


CPU = Sizes(
    shape={
        "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 768,
        "tie_word_embeddings": True,
    },
    prompt_tokens=(20, 60), log_mean_tokens=3.6, longest=512,
)  # fmt: skip

GPU = Sizes(
    shape=QWEN3["0.6B"], prompt_tokens=(256, 512), log_mean_tokens=6.0, longest=4096,
    copied_bytes=2 << 30,
)  # fmt: skip

TINY = Sizes(
    shape={
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48,
        "tie_word_embeddings": True,
    },
    prompt_tokens=(2, 4), num_prompts=2, num_completions=2, log_mean_tokens=1.0, longest=6,
    equal_tokens=4, sampled_mean=3, longest_in_step=6, strategy_steps=1, scales=(1, 2),
    scaling_tokens=3, num_waiting=(0, 8), bookkeeping_rows=3, num_syncs=1, copied_bytes=1 << 16,
    truncated_rows=2, truncated_vocab=8192, num_truncations=1,
)  # fmt: skip
# Shows that a workload runs; its figures say nothing.


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a workload is run with."""

    device: str
    repetitions: int
    sizes: Sizes
    batch_size: int | None = None
    """Of `model.generate`; None: each workload's own."""
