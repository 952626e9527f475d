"""Where a rollout's time goes on this machine.

Coarse, by wrapping functions: forwards and their parts, sampling, bookkeeping, delivery. Fine, by
torch.profiler: every operator's own time. The long-tailed rollout, warmed up.
"""

from typing import Any

import torch

from cb_rollout.tools.bench.contenders import Contender, ours
from cb_rollout.tools.bench.model import create_model
from cb_rollout.tools.bench.seams import (
    ATTENTION,
    DECODE,
    DELIVERY,
    FINE,
    FORWARD,
    LINEAR,
    SAMPLING,
    STEP,
)
from cb_rollout.tools.bench.sizes import Setup
from cb_rollout.tools.bench.spans import Path, watched
from cb_rollout.tools.bench.turns import synchronize, timed
from cb_rollout.tools.bench.workload import Workload, long_tailed

ROWS = {
    "prefill forwards": FORWARD,
    "decode forwards: attention and its keys": ATTENTION,
    "decode forwards: linear layers": LINEAR,
    "decode forwards: other operations": FORWARD,
    "sampling": SAMPLING,
    "bookkeeping": STEP,
    "delivery": DELIVERY,
    "input_processor, collecting, sync": None,
}
# Each row with the function whose calls are counted in it; None: what is outside of all.

DECODE_ROWS = {name: row for row, name in ROWS.items() if row.startswith("decode")}

NUM_OPERATORS = 25
# Those after them take less than a percent each.


def bench(setup: Setup) -> dict[str, Any]:
    """Seconds and percent of each part, and of each operator."""
    model, workload = create_model(setup.sizes.shape, setup.device), long_tailed(setup.sizes)
    # A graph is one call: nothing inside it could be told apart.
    contender = ours(**{} if setup.device == "cpu" else {"use_cuda_graph": False})
    seconds, parts = _coarse(contender, model, workload, setup.repetitions)
    return {
        "rollout": {"seconds, unwatched": seconds, "tokens": workload.num_tokens},
        "where the time goes": parts,
        "operators": _fine(contender, model, workload),
    }


def row_of(path: Path) -> str:
    """Which row of the table what was running belongs to."""
    if DELIVERY in path:
        return "delivery"
    if SAMPLING in path:
        return "sampling"
    if FORWARD not in path:
        return "bookkeeping"
    if DECODE not in path:
        return "prefill forwards"
    return DECODE_ROWS[path[-1]]


def _coarse(
    contender: Contender, model: Any, workload: Workload, repetitions: int
) -> tuple[float, dict[str, Any]]:
    """Seconds of a rollout that nobody watches, and the parts of one that is watched."""
    unwatched = watched_total = 0.0
    seconds, calls = dict.fromkeys(ROWS, 0.0), dict.fromkeys(ROWS, 0)
    with contender.create(model, workload) as run:
        run(workload)
        for _ in range(repetitions):
            unwatched += timed(lambda: run(workload))
            with watched(FINE, synchronize) as spans:
                watched_total += timed(lambda: run(workload))
            for path, spent in spans.seconds.items():
                row = row_of(path)
                seconds[row] += spent
                calls[row] += spans.calls[path] if path[-1] == ROWS[row] else 0
    seconds["input_processor, collecting, sync"] = watched_total - sum(seconds.values())
    return unwatched / repetitions, {
        row: {
            "seconds": seconds[row] / repetitions,
            "percent": 100 * seconds[row] / watched_total,
            "calls": calls[row] // repetitions,
        }
        for row in ROWS
    }


def _fine(contender: Contender, model: Any, workload: Workload) -> dict[str, Any]:
    """Every operator's own time in one rollout, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    is_on_gpu = model.device.type == "cuda"
    if is_on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with contender.create(model, workload) as run:
        run(workload)
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            run(workload)
            synchronize()
    own = "self_device_time_total" if is_on_gpu else "self_cpu_time_total"
    found = sorted(profiler.key_averages(), key=lambda event: -getattr(event, own))
    total = sum(getattr(event, own) for event in found)
    shown = {e.key: (getattr(e, own), e.count) for e in found[:NUM_OPERATORS]}
    rest = found[NUM_OPERATORS:]
    if rest:
        shown["all others"] = sum(getattr(e, own) for e in rest), sum(e.count for e in rest)
    return {
        name: {"seconds": spent / 1e6, "percent": 100 * spent / total, "calls": count}
        for name, (spent, count) in shown.items()
    }
