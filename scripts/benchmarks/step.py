"""The workloads `step`, with the memory of the loss, and `bitwise`."""

from functools import partial
from typing import Any

import torch

from benchmarks.sizes import Setup
from cb_rollout.engine.memory.device import empty_cache
from cb_rollout.tools.bench import step
from cb_rollout.tools.bench.contenders import ours
from cb_rollout.tools.bench.step import (
    QUIET,
    GenerationPath,
    StepClock,
    bench_batch,
    create_trainer,
)
from cb_rollout.tools.bench.timing import ResidentPeak, throughputs
from cb_rollout.tools.bench.workload import create_model, long_tailed


class LossMemory:
    """Measure the memory that forward and backward of a trainer's loss add to what it held."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self.num_bytes = 0
        self._device, self._backward = device, trainer.accelerator.backward
        self._compute_loss = trainer.compute_loss
        self._peak: ResidentPeak | None = None
        self._held = 0
        trainer.compute_loss, trainer.accelerator.backward = self._forward, self._and_backward

    def _forward(self, *arguments: Any, **named: Any) -> Any:
        empty_cache(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._held = torch.cuda.memory_allocated(self._device)
        else:
            self._peak = ResidentPeak().__enter__()
            self._held = self._peak.num_bytes
        return self._compute_loss(*arguments, **named)

    def _and_backward(self, *arguments: Any, **named: Any) -> None:
        self._backward(*arguments, **named)
        if self._peak is None:
            self.num_bytes = torch.cuda.max_memory_allocated(self._device) - self._held
        else:
            self._peak.__exit__()
            self.num_bytes = self._peak.num_bytes - self._held


class MemoryClock(StepClock):
    """Measure the memory of the loss too."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._memory = LossMemory(trainer, trainer.accelerator.device)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock, after the update."""
        super().on_step_end()
        self.figures["loss_peak_bytes"] = self._memory.num_bytes


def bench_step(setup: Setup) -> dict[str, Any]:
    """Return the seconds of one step of each path, for each batch, and the memory of its loss."""
    return step.bench_step(setup, MemoryClock)


def bench_bitwise(setup: Setup) -> dict[str, Any]:
    """Return what `numerics="bitwise"` costs: a rollout's tokens per second, a step's seconds."""
    sizes, note = setup.sizes, "its defaults, without records"
    contenders = {"fast": ours(), "bitwise": ours(numerics="bitwise")}
    paths = {n: GenerationPath(note, rollout=QUIET | {"numerics": n}) for n in contenders}
    model = create_model(sizes.shape, setup.device)
    return {
        "bitwise_rollout": throughputs(contenders, model, long_tailed(sizes), setup.repetitions),
        "bitwise_step": bench_batch(
            "bitwise_step", setup.repetitions, paths, partial(create_trainer, setup), MemoryClock
        ),
    }
