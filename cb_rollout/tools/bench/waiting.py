"""What a waiting request holds of the host's memory beside its tokens, and where that was taken."""

import gc
import linecache
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cb_rollout
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.tools.bench.model import create_model
from cb_rollout.tools.bench.sizes import SEED, Setup

ASKED_BYTES = 2048
NUM_HOLDERS = 8
PROMPT_TOKENS = 32, 96
# Two lengths: the slope between them is what a token takes, and what is left is the request.

PACKAGE = Path(cb_rollout.__file__).parent


def waiting_bytes(setup: Setup) -> dict[str, Any]:
    """Bytes of a waiting request beside its tokens, and the lines that took most of them."""
    model, count = create_model(setup.sizes.shape, setup.device), max(setup.sizes.num_waiting)
    short, _ = _taken(model, count, PROMPT_TOKENS[0])
    long, holders = _taken(model, count, PROMPT_TOKENS[1])
    per_token = (long - short) / (PROMPT_TOKENS[1] - PROMPT_TOKENS[0])
    return {
        "waiting": {
            "requests": count,
            "bytes a request beside its tokens": short - per_token * PROMPT_TOKENS[0],
            "bytes a token": per_token,
            "bytes a request, asked at most": ASKED_BYTES,
        },
        f"held by, bytes a request of {PROMPT_TOKENS[1]} tokens": holders,
    }


def _taken(model: Any, count: int, num_tokens: int) -> tuple[float, dict[str, float]]:
    """Bytes a request that so many queued ones take, and the lines that take most."""
    manager = ContinuousBatchingManager(
        model, continuous_batching_config=cb_rollout.RolloutConfig(seed=SEED)
    )
    params = cb_rollout.SamplingParams(max_new_tokens=8, ignore_eos=True)
    vocab_size = model.config.vocab_size
    prompts = [[2 + (i + j) % (vocab_size - 2) for j in range(num_tokens)] for i in range(count)]
    # The first of its kind makes what all share.
    manager.add_requests(prompts[:1], sampling_params=params)
    with _allocations() as before:
        manager.add_requests(prompts, sampling_params=params)
        gc.collect()
        lines = tracemalloc.take_snapshot().compare_to(before, "lineno")
    held = {_said(line.traceback[0]): line.size_diff / count for line in lines[:NUM_HOLDERS]}
    return sum(line.size_diff for line in lines) / count, held


@contextmanager
def _allocations() -> Iterator[tracemalloc.Snapshot]:
    """Within, what is allocated is traced; gives what was there before."""
    gc.collect()
    tracemalloc.start()
    try:
        yield tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()


def _said(frame: tracemalloc.Frame) -> str:
    """A line of code, and where it is."""
    if frame.filename == "<string>":
        return f"<a dataclass's __init__>:{frame.lineno}"
    path = Path(frame.filename)
    name = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE) else path.name
    return f"{name}:{frame.lineno} {linecache.getline(frame.filename, frame.lineno).strip()}"
