"""The workload `strategies`: over-sampling and other strategies, beside plain groups.

Lengths are long-tailed. Weights are synced after each collection as in training, so the keys of
carried sequences are computed again.
"""

import itertools
from typing import Any

import cb_rollout
from cb_rollout.strategies import (
    DynamicSampling,
    GroupCollector,
    OverSampling,
    PartialRollouts,
    Plain,
    RequestStream,
)
from cb_rollout.tools.bench.timing import summary, timed
from cb_rollout.tools.bench.workload import SEED, Setup, create_ending_model, long_tailed


def bench_strategies(setup: Setup) -> dict[str, Any]:
    """Return tokens, rewards and groups with an advantage per second of each strategy."""
    sizes = setup.sizes
    model = create_ending_model(sizes.shape, setup.device, sizes.sampled_mean)
    num_groups = sizes.num_prompts // 2
    strategies = {
        "plain": Plain(),
        "over_sampling": OverSampling(num_extra_groups=max(1, num_groups // 2)),
        "dynamic_sampling": DynamicSampling(num_extra_groups=2),
        "partial_rollouts": PartialRollouts(num_extra_groups=num_groups, max_staleness=4),
    }
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in strategies}
    for repetition in range(setup.repetitions):
        for name, strategy in strategies.items():
            rates = _rates(setup, model, strategy, num_groups, SEED + repetition)
            for unit, value in rates.items():
                figures[name].setdefault(unit, []).append(value)
            text = ", ".join(f"{value:,.1f} {unit}" for unit, value in rates.items())
            print(f"  {repetition + 1}/{setup.repetitions} {name:<20}{text}", flush=True)
    return {
        unit: {name: summary(values[unit], unit) for name, values in figures.items()}
        for unit in next(iter(figures.values()))
    }


def hard_or_easy(prompt: list[int], outputs: list[Any]) -> list[float]:
    """Return rewards that differ within the groups of half of the prompts only."""
    if sum(prompt) % 2:
        return [0.0] * len(outputs)
    return [float(output.generated_tokens[0] % 2) for output in outputs]


def _rates(setup: Setup, model: Any, strategy: Any, num_groups: int, seed: int) -> dict[str, float]:
    sizes = setup.sizes
    prompts = long_tailed(sizes).prompts[:: sizes.num_completions]
    params = cb_rollout.SamplingParams(max_new_tokens=sizes.longest)
    with cb_rollout.RolloutGenerator(model, cb_rollout.RolloutConfig(seed=seed)) as generator:
        collector = GroupCollector(
            RequestStream(generator, params), itertools.cycle(prompts), hard_or_easy, strategy,
            num_generations=sizes.num_completions,
        )  # fmt: skip
        # The first collection warms up.
        collector.collect(num_groups)
        generator.sync_weights()
        groups, seconds = [], 0.0
        for _ in range(sizes.strategy_steps):
            seconds += timed(lambda: groups.extend(collector.collect(num_groups)))
            generator.sync_weights()
        collector.close()
    return {
        "useful_tokens_per_second": sum(group.num_tokens for group in groups) / seconds,
        "reward_per_second": sum(sum(group.rewards) for group in groups) / seconds,
        "groups_with_advantage_per_second": sum(g.has_advantage for g in groups) / seconds,
    }
