"""Fail where a rollout is not ahead of `generate` by as much as it was.

    OMP_NUM_THREADS=1 python scripts/measure/speed_floor.py

Two models, a small one and SmolLM2-135M-Instruct, take turns with `generate` in this process. Each
floor is about half of the ratio that was recorded: a fast path that is lost costs as much, while
noise and a busy neighbour cost less. On one thread nothing waits for a thread that a busy machine
has put aside.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import transformers

# The instruments share what stands in `scripts/`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.chats import load
from cb_rollout.tools.bench import (
    SMALL_SHAPE,
    Workload,
    create_model,
    generate,
    long_tailed,
    ours,
    timed,
)

NUM_TURNS = 2

# Tokens of a warm-up run. Our trace is made before it.
WARM_UP_TOKENS = 80


@dataclass(frozen=True, kw_only=True)
class Race:
    """A model, its workload, and the ratio that a rollout has to reach."""

    name: str
    create: Callable[[], Any]
    num_prompts: int
    """Groups of eight completions."""
    longest: int
    """Tokens of the longest completion."""
    recorded: float
    """Ratio that was measured on one thread (docs/dev/LOG.md)."""

    @property
    def floor(self) -> float:
        """The ratio below which the race fails."""
        return self.recorded / 2

    def ratio(self) -> float:
        """Return how many times as fast as `generate` a rollout is: the median of the turns."""
        model = self.create()
        workload = long_tailed(
            model.config.vocab_size,
            num_prompts=self.num_prompts,
            prompt_tokens=(20, 60),
            log_mean=3.2,
            longest=self.longest,
        )
        warm_up = Workload(workload.prompts[:2], [WARM_UP_TOKENS] * 2)
        batches = partial(generate, batch_size=len(workload.prompts))
        ratios: list[float] = []
        with ours(model, workload) as our_run, batches(model, workload) as run_of_generate:
            our_run(warm_up)
            run_of_generate(warm_up)
            for _ in range(NUM_TURNS):
                our_seconds = timed(partial(our_run, workload))
                ratios.append(timed(partial(run_of_generate, workload)) / our_seconds)
        return median(ratios)


def small_model() -> Any:
    """Return the bench's small model, with random weights."""
    return create_model(SMALL_SHAPE, "cpu")


def real_model() -> Any:
    """Return SmolLM2, which ends no completion by itself."""
    _, model = load("cpu")
    return model


RACES = (
    Race(name="small", create=small_model, num_prompts=8, longest=128, recorded=3.5),
    Race(name="SmolLM2-135M", create=real_model, num_prompts=2, longest=48, recorded=2.0),
)


def main() -> int:
    """Run the races, and print each ratio beside its floor."""
    transformers.logging.set_verbosity_error()
    num_lost = 0
    for race in RACES:
        ratio = race.ratio()
        print(f"{race.name}: {ratio:.2f} times `generate`, at least {race.floor:.2f}", flush=True)
        num_lost += ratio < race.floor
    return int(num_lost > 0)


if __name__ == "__main__":
    sys.exit(main())
