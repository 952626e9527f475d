"""Throughput from one request at once to 1,024, and what a waiting request holds of memory.

Short completions, one warming up with few requests, and a contender is left out where its turn
would be long: the whole takes less than four minutes.
"""

from typing import Any

from cb_rollout.tools.bench.contenders import Contender, generate, ours, transformers_batching
from cb_rollout.tools.bench.model import create_model
from cb_rollout.tools.bench.sizes import Setup
from cb_rollout.tools.bench.turns import Turn, take_turn, throughput
from cb_rollout.tools.bench.waiting import waiting_bytes
from cb_rollout.tools.bench.workload import Workload, equal_lengths

LARGEST_BATCH = 128
# Of `generate`: on the CPU model, larger ones are slower.

LARGEST_WARM_UP, NUM_WARM_UPS = 64, 3
# Of few tokens each: what is made once, a trace after 64 steps, is made before the time counts.

POINT_SECONDS = 12.0
# No further repetition of a point begins after.

LONGEST_TURN_SECONDS = 45.0
# A contender that would take longer, by what its last point took, is left out of this one.


def bench(setup: Setup) -> dict[str, Any]:
    """Useful tokens per second by how many requests are there at once; and bytes."""
    model = create_model(setup.sizes.shape, setup.device)
    rates: dict[str, float] = {}
    results = {}
    for count in setup.sizes.scales:
        workload = equal_lengths(setup.sizes, count, setup.sizes.scaling_tokens)
        contenders = {
            name: contender
            for name, contender in _contenders(setup, count).items()
            if _is_feasible(name, rates, workload)
        }
        print(f"scaling: {count} requests")
        turns = _turns(contenders, model, workload, setup.repetitions)
        results[f"{count} requests"] = point = {
            name: throughput(contender, turns[name], workload.num_tokens)
            for name, contender in contenders.items()
        }
        rates |= {name: figures["median"] for name, figures in point.items()}
    return results | waiting_bytes(setup)


def _contenders(setup: Setup, count: int) -> dict[str, Contender]:
    """Each with as many rows at once as are good for it; ours finds out by itself."""
    return {
        "cb_rollout": ours(),
        "transformers CB": transformers_batching(max_requests_per_batch=count),
        "model.generate": generate(setup.batch_size or min(count, LARGEST_BATCH)),
    }


def _is_feasible(name: str, rates: dict[str, float], workload: Workload) -> bool:
    """Whether a contender's turn is short, were it no faster than at the last point."""
    if name not in rates or workload.num_tokens / rates[name] <= LONGEST_TURN_SECONDS:
        return True
    print(f"  {name} is left out: it would take more than {LONGEST_TURN_SECONDS:.0f} s")
    return False


def _turns(
    contenders: dict[str, Contender], model: Any, workload: Workload, repetitions: int
) -> dict[str, list[Turn]]:
    """Turns of one point: at least one each, and no further ones when the time is over."""
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    warm_up = workload.first(LARGEST_WARM_UP)
    for _ in range(repetitions):
        for name, contender in contenders.items():
            turns[name].append(take_turn(contender, model, workload, warm_up, NUM_WARM_UPS))
            print(f"  {name:<28}{turns[name][-1].seconds:8.2f} s", flush=True)
        if sum(turn.seconds for taken in turns.values() for turn in taken) > POINT_SECONDS:
            break
    return turns
