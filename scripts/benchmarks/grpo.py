"""GRPO steps on a GPU in TRL's default precision: float32 weights, under autocast to bfloat16."""

import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import cb_rollout
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

# The loss's tokens say by which path it was computed: packed, or padded, which computes more than
# it uses. The drift, in nats, is that of the sampled log-probabilities from a plain forward's.
LOGGED = {
    "loss_tokens_computed": "rollout/loss_tokens_computed",
    "loss_tokens_useful": "rollout/loss_tokens_useful",
    "prompts_shared": "rollout/prompts_shared",
    "drift_mean": "rollout/logprob_drift_mean",
    "drift_max": "rollout/logprob_drift_max",
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
        graphs = getattr(engine.paged_model.decode_path, "graphs", None)
        self.steps.append(
            {
                "what": f"GRPO step {len(self.steps) + 1} of {NUM_STEPS}",
                "seconds": seconds["seconds"],
                "rollout_seconds": seconds["rollout"],
                "scoring_seconds": seconds["scoring"],
                "loss_seconds": seconds["forward"] + seconds["backward"],
                # A part of the rollout's.
                "sync_seconds": self._methods.get("sync", 0.0),
                "graphs": 0 if graphs is None else graphs.num_graphs,
                "decode_path": engine.paged_model.describe_decoding(),
            }
        )
        print(self.steps[-1], flush=True)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep the loss's counts of tokens, and the drift."""
        logged = {name: logs[key] for name, key in LOGGED.items() if logs and key in logs}
        self.steps[-1] |= logged


def bench_grpo(sizes: Sizes, device: str, **settings: Any) -> list[dict[str, Any]]:
    """Return the seconds and paths of three GRPO steps, with fields of `RolloutConfig`."""
    clocks: list[GrpoClock] = []

    def create_clock(trainer: Any) -> GrpoClock:
        clocks.append(GrpoClock(trainer))
        return clocks[0]

    # A few forwards more in each step, so that each step says how far its rollout was off.
    path = _path(verify_every_steps=1, **settings)
    setup = Setup(device=device, repetitions=1, sizes=sizes)
    timed_step(partial(create_trainer, setup), path, create_clock)
    return clocks[0].steps


def attached_path(sizes: Sizes, device: str, **settings: Any) -> str:
    """Attach to such a trainer, which compiles and captures, and return the decode path."""
    path = _path(**settings)
    setup = Setup(device=device, repetitions=1, sizes=sizes)
    with tempfile.TemporaryDirectory() as folder:
        trainer = create_trainer(setup, path, folder)
        generator = cb_rollout.attach(trainer, cb_rollout.RolloutConfig(**path.rollout or {}))
        decode_path = generator.manager.decode_path
        cb_rollout.detach(trainer)
    return decode_path


def _path(**settings: Any) -> GenerationPath:
    return GenerationPath("TRL's default precision", trl=TRL, rollout=QUIET | settings)
