"""Scenarios of the workload `simulate`: one model on one machine, and on up to 1,000 GPUs.

The speeds are assumed, not measured: a decode step of an 8 B model in bfloat16 reads its weights
and keys at 70% of an H100's bandwidth, and the trainer reaches 40% of its products.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.cluster.simulation import Mode, Scenario, Speeds

PARAMETERS, BYTES = 8.2e9, 2
# Of an H100 SXM: bytes and bfloat16 operations a second.
BANDWIDTH, OPERATIONS = 3.35e12 * 0.7, 989e12 * 0.4
# Of a token in 36 layers with 8 key heads of 128.
KEY_BYTES = 36 * 2 * 8 * 128 * BYTES
LINK_BYTES = 12.5e9

MEDIAN_TOKENS, SPREAD, LONGEST = 2000, 0.9, 16384
PROMPT_TOKENS = 300
GROUP_SIZE = 8
SLOTS = 256


def scenarios(gpus: Iterable[int]) -> dict[str, Scenario]:
    """Return scenarios by name; each step trains on eight groups for each GPU.

    Args:
        gpus: numbers of GPUs.
    """
    found = {}
    for num_gpus in gpus:
        found[f"{num_gpus} GPUs, colocated"] = _scenario(num_gpus, num_gpus, Mode.WAITING)
        # A third of the GPUs train.
        num_engines = num_gpus - num_gpus // 3
        for staleness in (1, 4):
            found[f"{num_gpus} GPUs, pooled, max_staleness={staleness}"] = _scenario(
                num_engines, num_gpus // 3, Mode.OVERLAPPING, staleness
            )
        name = f"{num_gpus} GPUs, pooled, each engine ends every four hours"
        found[name] = replace(
            found[f"{num_gpus} GPUs, pooled, max_staleness=4"], failures_per_hour=0.25
        )
    return found


def _scenario(
    num_engines: int,
    num_trainers: int,
    mode: Mode,
    max_staleness: int = 1,
) -> Scenario:
    num_gpus = num_engines if mode == Mode.WAITING else num_engines + num_trainers
    num_groups = 8 * num_gpus
    mean = MEDIAN_TOKENS * math.exp(SPREAD**2 / 2)
    num_tokens = num_groups * GROUP_SIZE * (mean + PROMPT_TOKENS)
    train = 6 * PARAMETERS * num_tokens / (OPERATIONS * num_trainers)
    return Scenario(
        mode=mode, speeds=_speeds(mean), num_engines=num_engines, num_groups=num_groups,
        group_size=GROUP_SIZE, prompt_tokens=PROMPT_TOKENS, draw_length=_length, train=train,
        sync=0.0 if mode == Mode.WAITING else PARAMETERS * BYTES / LINK_BYTES,
        max_staleness=max_staleness, restart=120.0,
    )  # fmt: skip


def _speeds(mean_tokens: float) -> Speeds:
    keys = (PROMPT_TOKENS + mean_tokens / 2) * KEY_BYTES
    steps = [
        (rows, (PARAMETERS * BYTES + rows * keys) / BANDWIDTH) for rows in (1, SLOTS)
    ]  # fmt: skip
    return Speeds(steps=steps, prefill=2 * PARAMETERS / OPERATIONS, num_slots=SLOTS)


def _length(draws: random.Random) -> int:
    return min(LONGEST, max(1, int(draws.lognormvariate(math.log(MEDIAN_TOKENS), SPREAD))))
