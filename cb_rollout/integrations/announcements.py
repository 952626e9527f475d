"""Log a line for each thing that will make an attached training slow, before it begins.

Owns the words, and the measurement of a busy machine. Changes nothing. Called by `attach`, in the
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

# Numbers in the tensor whose exponentials are timed: enough for torch to divide over threads, and
# small enough to take about a millisecond.
NUM_TIMED = 1 << 19
NUM_REPEATS = 9

# Threads that help need less than the time of one; above this ratio they hinder.
HINDERING_RATIO = 1.25


def announce(trainer: Any, sampler: Sampler) -> None:
    """Log what slows this training down, a line for each; nothing: no line."""
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
    """Yield that the KV cache holds few of a rollout's sequences at a time, if it does."""
    length = generator.defaults.max_new_tokens
    num_rows = getattr(trainer.args, "generation_batch_size", None)
    if not length or not num_rows:
        return
    num_rows = num_rows // trainer.accelerator.num_processes
    plan = generator.memory_plan()
    block_size = generator.config.block_size
    # A block holds at least a part of the prompt.
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
    """Yield that torch's threads wait for each other, if several take longer than one.

    Where the machine shows its load, fewer threads compute meanwhile, and there is nothing to say.
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
    """Time an operation by all threads and by one, alternately, and return the medians."""
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
