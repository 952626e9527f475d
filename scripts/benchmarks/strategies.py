"""The workload `strategies`: over-sampling and other strategies, beside plain groups.

Lengths are long-tailed. Weights are synced after each collection as in training, so the keys of
carried sequences are computed again.

The processes of data-parallel training roll out without a word to each other, and wait for the
slowest. They are measured one after the other, each with the whole machine, as on devices of their
own.
"""

import itertools
import statistics
from typing import Any, NamedTuple

import cb_rollout
from benchmarks.harness.records import summary
from benchmarks.harness.workload import long_tailed
from benchmarks.models import create_ending_model
from benchmarks.sizes import Setup
from cb_rollout.strategies import (
    DynamicSampling,
    Group,
    GroupCollector,
    OverSampling,
    PartialRollouts,
    Plain,
    RequestStream,
    Strategy,
)
from cb_rollout.tools.bench import SEED, timed

NUM_PROCESSES = 4


class Collection(NamedTuple):
    """Groups of one step of one process."""

    seconds: float
    groups: list[Group]


def bench_strategies(setup: Setup) -> dict[str, Any]:
    """Return the figures of each strategy, of one process and of several."""
    sizes = setup.sizes
    model = create_ending_model(sizes.shape, setup.device, sizes.sampled_mean)
    num_groups = max(1, sizes.num_prompts // 2)
    strategies: dict[str, Strategy] = {
        "plain": Plain(),
        "over_sampling": OverSampling(num_extra_groups=max(1, num_groups // 2)),
        "dynamic_sampling": DynamicSampling(num_extra_groups=2),
        "partial_rollouts": PartialRollouts(num_extra_groups=num_groups, max_staleness=4),
    }
    figures: dict[str, dict[str, list[float]]] = {}
    for repetition in range(setup.repetitions):
        for name, strategy in strategies.items():
            alone = _collections(setup, model, strategy, num_groups, SEED + repetition)
            rates = _rates(alone)
            several = [
                _collections(setup, model, strategy, num_groups, SEED + repetition, rank)
                for rank in range(NUM_PROCESSES)
            ]
            rates |= _rates_of_processes(several)
            for unit, value in rates.items():
                figures.setdefault(unit, {}).setdefault(name, []).append(value)
            text = ", ".join(f"{value:,.2f} {unit}" for unit, value in rates.items())
            print(f"  {repetition + 1}/{setup.repetitions} {name:<20}{text}", flush=True)
    return {
        unit: {name: summary(values, unit) for name, values in rows.items()}
        for unit, rows in figures.items()
    }


def hard_or_easy(prompt: list[int], outputs: list[Any]) -> list[float]:
    """Return rewards that differ within the groups of half of the prompts only."""
    if sum(prompt) % 2:
        return [0.0] * len(outputs)
    return [float(output.generated_tokens[0] % 2) for output in outputs]


def _collections(
    setup: Setup,
    model: Any,
    strategy: Strategy,
    num_groups: int,
    seed: int,
    rank: int | None = None,
) -> list[Collection]:
    """Return the steps of one process.

    Args:
        setup: of the workload.
        model: rolled out.
        strategy: of the process.
        num_groups: collected in each step.
        seed: of the draws.
        rank: the process has every `NUM_PROCESSES`-th prompt from this one on; None: all.
    """
    sizes = setup.sizes
    prompts = long_tailed(sizes).prompts[:: sizes.num_completions]
    if rank is not None:
        prompts = prompts[rank % len(prompts) :: NUM_PROCESSES]
        seed += 1000 * (rank + 1)
    params = cb_rollout.SamplingParams(max_new_tokens=sizes.longest)
    with cb_rollout.RolloutGenerator(model, cb_rollout.RolloutConfig(seed=seed)) as generator:
        collector = GroupCollector(
            RequestStream(generator, params), itertools.cycle(prompts), hard_or_easy, strategy,
            num_generations=sizes.num_completions,
        )  # fmt: skip
        # The first collection warms up.
        collector.collect(num_groups)
        generator.sync_weights()
        collections = []
        for _ in range(sizes.strategy_steps):
            groups: list[Group] = []
            seconds = timed(lambda found=groups: found.extend(collector.collect(num_groups)))
            collections.append(Collection(seconds, groups))
            generator.sync_weights()
        collector.close()
    return collections


def _rates(collections: list[Collection]) -> dict[str, float]:
    seconds = sum(collection.seconds for collection in collections)
    groups = [group for collection in collections for group in collection.groups]
    return {
        "useful_tokens_per_second": sum(group.num_tokens for group in groups) / seconds,
        "reward_per_second": sum(sum(group.rewards) for group in groups) / seconds,
        "groups_with_advantage_per_second": sum(g.has_advantage for g in groups) / seconds,
    }


def _rates_of_processes(processes: list[list[Collection]]) -> dict[str, float]:
    """Return the figures of processes that wait for the slowest after each step."""
    steps = list(zip(*processes, strict=True))
    slowest = sum(max(one.seconds for one in step) for step in steps)
    busy = sum(statistics.mean(one.seconds for one in step) for step in steps)
    groups = [group for step in steps for one in step for group in one.groups]
    name = f"of_{NUM_PROCESSES}_processes"
    return {
        f"useful_tokens_per_second_{name}": sum(g.num_tokens for g in groups) / slowest,
        f"groups_with_advantage_per_second_{name}": sum(g.has_advantage for g in groups) / slowest,
        f"share_of_waiting_{name}": 1 - busy / slowest,
    }
