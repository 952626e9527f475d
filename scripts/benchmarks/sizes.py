"""Sizes of every workload, on the sizes of those that the wheel has."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import workload
from benchmarks.harness.workload import CPU, GPU, LLAMA_135M
from cb_rollout.tools.bench import QWEN3_SMALLEST

QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3_SMALLEST,
    "4B": QWEN3_SMALLEST
    | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
       "intermediate_size": 9728},
    "8B": QWEN3_SMALLEST
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
       "intermediate_size": 12288, "tie_word_embeddings": False},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes(workload.Sizes):
    """Sizes of the model and of each workload."""

    sampled_mean: int | None = 50
    """Mean length where the model ends completions itself; None: it ends none."""
    longest_in_step: int = 256
    """Maximum length of a completion in a GRPO step."""
    counts_forwards: bool = True
    """Count the products of each contender's own forwards, in one more run of `rollout`."""
    strategy_steps: int = 4
    """Timed collections of each strategy."""
    scales: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    """Concurrent requests of each point of `scaling`."""
    scaling_tokens: int = 32
    """Length of every completion in `scaling`."""
    num_waiting: tuple[int, ...] = (0, 100, 10_000)
    """Waiting requests in `bookkeeping`; the memory of the largest number is measured."""
    bookkeeping_rows: int = 256
    """Sequences that decode in `bookkeeping`."""
    num_syncs: int = 20
    """Weight syncs in one repetition."""
    truncated_rows: int = 16
    """Rows of logits in `truncation`."""
    truncated_vocab: int = QWEN3["8B"]["vocab_size"]
    """Logits of each of these rows."""
    num_truncations: int = 5
    """Turns of each implementation in one repetition of `truncation`."""
    simulated_gpus: tuple[int, ...] = (8, 64, 1000)
    """GPUs of the scenarios of `simulate`."""
    copied_bytes: int = 64 << 20
    """Size of the copy that measures bandwidth."""
    modelled_shapes: dict[str, dict[str, Any]] = field(default_factory=lambda: QWEN3)
    """Models of `gpu_model`, by name."""
    modelled_rows: tuple[int, ...] = (1, 32, 256, 1024)
    """Rows of its decode steps."""
    modelled_tokens: tuple[int, ...] = (300, 2000, 8000)
    """Tokens of each row."""
    compiled_tokens: int = 500
    """Tokens of each row of the step of `gpu_compiled`."""
    modelled_prefills: tuple[tuple[int, int], ...] = ((1, 300), (16, 512), (1, 8000))
    """Prompts of its prefills, and tokens of each."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Arguments of a workload."""

    device: str
    repetitions: int
    sizes: Sizes
    batch_size: int | None = None
    """Batch size of `model.generate`; None: each workload's own."""


def extended(sizes: workload.Sizes, **more: Any) -> Sizes:
    """Return the wheel's sizes with those of the other workloads."""
    return Sizes(**vars(sizes), **more)


MODELS = {
    "small": extended(CPU),
    # Transformers' own contenders take minutes; a run that counts would double them.
    "135m": extended(LLAMA_135M, counts_forwards=False),
    "0.6b": extended(GPU, copied_bytes=2 << 30),
}

# For tests: figures of these sizes mean nothing.
TINY = extended(
    workload.TINY,
    sampled_mean=3, longest_in_step=6,
    strategy_steps=1, scales=(1, 2), scaling_tokens=3, num_waiting=(0, 8), bookkeeping_rows=3,
    num_syncs=1, copied_bytes=1 << 16, truncated_rows=2, truncated_vocab=8192, num_truncations=1,
    modelled_shapes={"tiny": workload.TINY.shape}, modelled_rows=(2,), modelled_tokens=(5,),
    modelled_prefills=((2, 3),), compiled_tokens=5, simulated_gpus=(8,),
)  # fmt: skip
