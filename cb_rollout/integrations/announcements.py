"""Log a line for each thing that will make an attached training slow, before it begins.

Owns the texts, and the measurement of a busy machine. Changes nothing. Called by `attach`, in the
trainer's main process.
"""

import logging
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from cb_rollout.engine.memory.plan import GIB
from cb_rollout.engine.service.thread_share import clocks
from cb_rollout.rollout.sampler import Sampler

_LOGGER = logging.getLogger("cb_rollout")

# A cache for fewer sequences than this share of a rollout is said to be small.
SMALL_SHARE = 1 / 4

# Numbers in the tensor whose exponentials are timed: enough that torch divides them over threads,
# and few enough to take about a millisecond.
NUM_TIMED = 1 << 19
NUM_REPEATS = 9

# Several threads that help take less time than one thread; above this ratio they hinder.
HINDERING_RATIO = 1.25


def announce(trainer: Any, sampler: Sampler) -> None:
    """Log one line for each thing that slows this training down."""
    generator = sampler.local_generator
    if generator is None:
        return
    for text in (*slower_paths(generator), *small_cache(trainer, generator), *busy_machine()):
        _LOGGER.warning("%s", text)


def slower_paths(generator: Any) -> Iterator[str]:
    """Yield the parts that could run faster on a CPU; on a GPU the engine says so itself."""
    engine = generator.manager.engine
    if engine.device.type != "cpu":
        return
    for path in engine.paged_model.paths:
        # Nobody expects CUDA graphs on a CPU.
        if path.obstacle and path.part != "CUDA graphs":
            yield f"rollouts run slower than they could. {path}."


def small_cache(trainer: Any, generator: Any) -> Iterator[str]:
    """Yield a text if the KV cache holds only few of a rollout's sequences at a time."""
    length = generator.defaults.max_new_tokens
    num_rows = getattr(trainer.args, "generation_batch_size", None)
    if not length or not num_rows:
        return
    num_rows = num_rows // trainer.accelerator.num_processes
    plan = generator.memory_plan()
    block_size = generator.config.block_size
    # At least one block of each sequence is for the prompt.
    blocks_each = 1 + -(-length // block_size)
    num_together = max(1, min(plan.num_slots, plan.num_blocks // blocks_each))
    if num_together >= num_rows * SMALL_SHARE or num_rows < 2:
        return
    size = plan.kv_bytes / GIB
    yield (
        f"the KV cache has room for about {num_together:,} of a rollout's {num_rows:,} sequences "
        f"at a time ({plan.num_blocks:,} blocks of {block_size:,} tokens, {size:.2g} GiB; "
        f"max_completion_length={length:,}), so a rollout takes about "
        f"{-(-num_rows // num_together):,} times as many decode steps as with enough room. Raise "
        "num_blocks or max_memory_percent, or leave num_blocks out."
    )


def busy_machine() -> Iterator[str]:
    """Yield a text if torch's threads wait for each other: several take longer than one.

    If the machine shows its load, training uses fewer threads by itself, and nothing is yielded.
    """
    num_threads = torch.get_num_threads()
    if num_threads < 2 or clocks() is not None:
        return
    together, alone = _milliseconds_of_threads(num_threads)
    yield from hindrance(num_threads, together, alone)


def hindrance(num_threads: int, together: float, alone: float) -> Iterator[str]:
    """Yield the advice if `num_threads` take longer (`together`) than one thread (`alone`), ms."""
    if together > HINDERING_RATIO * alone:
        yield (
            f"the machine is busy: {num_threads} torch threads take {together / alone:.1f} times "
            f"as long as one ({together:.2g} ms instead of {alone:.2g} ms), because they wait for "
            "each other to get a core. Set OMP_NUM_THREADS to the number of idle cores, or to 1, "
            "before Python starts."
        )


def _milliseconds_of_threads(num_threads: int) -> tuple[float, float]:
    """Time an operation with all threads and with one, alternately; return the medians in ms."""
    numbers = torch.linspace(0, 1, NUM_TIMED)
    together: list[float] = []
    alone: list[float] = []
    try:
        for _ in range(NUM_REPEATS):
            for num, times in ((num_threads, together), (1, alone)):
                torch.set_num_threads(num)
                torch.exp(numbers)
                began = time.perf_counter()
                torch.exp(numbers)
                times.append(1e3 * (time.perf_counter() - began))
    finally:
        torch.set_num_threads(num_threads)
    return statistics.median(together), statistics.median(alone)
