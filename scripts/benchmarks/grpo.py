"""GRPO steps on a GPU in TRL's default precision: float32 weights, under autocast to bfloat16."""

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.sizes import MODELS, Setup, Sizes
from benchmarks.step import (
    CHECKPOINTING,
    QUIET,
    GenerationPath,
    StepClock,
    create_trainer,
    timed_step,
)

NUM_STEPS = 3

# Embeddings and head are tied, as in the real model, so no completion ends before the limit.
SIZES = replace(
    MODELS["0.6b"], num_prompts=8, num_completions=8, sampled_mean=None, longest_in_step=128
)

TRL = {
    "max_steps": NUM_STEPS, "bf16": True, CHECKPOINTING: True,
    "logging_strategy": "steps", "logging_steps": 1,
}  # fmt: skip

# They say by which path the loss was computed: packed, or padded, which computes more than is used.
LOSS_COUNTS = {
    "loss_tokens_computed": "rollout/loss_tokens_computed",
    "loss_tokens_useful": "rollout/loss_tokens_useful",
    "prompts_shared": "rollout/prompts_shared",
}


class GrpoClock(StepClock):
    """Keep the figures of every step, and the paths that it took."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.steps: list[dict[str, Any]] = []
        self._generator = generator = trainer.vllm_generation.generator
        generator.sync_weights = self._timed("sync", generator.sync_weights)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock, after the update."""
        super().on_step_end()
        engine, seconds = self._generator.manager.engine, self.figures
        self.steps.append(
            {
                "what": f"GRPO step {len(self.steps) + 1} of {NUM_STEPS}",
                "seconds": seconds["seconds"],
                "rollout_seconds": seconds["rollout"],
                "scoring_seconds": seconds["scoring"],
                "loss_seconds": seconds["forward"] + seconds["backward"],
                # A part of the rollout's.
                "sync_seconds": self._methods.get("sync", 0.0),
                "graphs": engine._graphs.num_graphs if engine._graphs else 0,
                "decode_path": engine.decode_path,
            }
        )
        print(self.steps[-1], flush=True)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep the loss's counts of tokens."""
        counts = {name: logs[key] for name, key in LOSS_COUNTS.items() if logs and key in logs}
        self.steps[-1] |= counts


def bench_grpo(sizes: Sizes, device: str, **settings: Any) -> list[dict[str, Any]]:
    """Return the seconds and paths of three GRPO steps, with fields of `RolloutConfig`."""
    clocks: list[GrpoClock] = []

    def create_clock(trainer: Any) -> GrpoClock:
        clocks.append(GrpoClock(trainer))
        return clocks[0]

    path = GenerationPath("TRL's default precision", trl=TRL, rollout=QUIET | settings)
    setup = Setup(device=device, repetitions=1, sizes=sizes)
    timed_step(partial(create_trainer, setup), path, create_clock)
    return clocks[0].steps
