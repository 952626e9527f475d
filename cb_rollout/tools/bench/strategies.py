"""Over-sampling and its like against plain groups, with a long tail.

A step is a collection of groups and a stand-in for the training that follows; the weights are
called changed after it, so what is carried is computed anew.
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
from cb_rollout.tools.bench.model import create_ending_model
from cb_rollout.tools.bench.sizes import SEED, Setup
from cb_rollout.tools.bench.turns import summary, timed
from cb_rollout.tools.bench.workload import long_tailed


def bench(setup: Setup) -> dict[str, Any]:
    """Useful tokens, rewards and groups to learn from per second of each strategy."""
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
            measured = _measured(setup, model, strategy, num_groups, SEED + repetition)
            for unit, value in measured.items():
                figures[name].setdefault(unit, []).append(value)
            said = ", ".join(f"{value:,.1f} {unit}" for unit, value in measured.items())
            print(f"  {repetition + 1}/{setup.repetitions} {name:<20}{said}", flush=True)
    return {
        unit: {name: summary(values[unit], unit) for name, values in figures.items()}
        for unit in next(iter(figures.values()))
    }


def hard_or_easy(prompt: list[int], outputs: list[Any]) -> list[float]:
    """Rewards; half of the prompts have no advantage to learn from."""
    if sum(prompt) % 2:
        return [0.0] * len(outputs)
    return [float(output.generated_tokens[0] % 2) for output in outputs]


def _measured(
    setup: Setup, model: Any, strategy: Any, num_groups: int, seed: int
) -> dict[str, float]:
    """Rates of one strategy's collections, after one to warm up."""
    sizes = setup.sizes
    prompts = long_tailed(sizes).prompts[:: sizes.num_completions]
    params = cb_rollout.SamplingParams(max_new_tokens=sizes.longest)
    with cb_rollout.RolloutGenerator(model, cb_rollout.RolloutConfig(seed=seed)) as generator:
        collector = GroupCollector(
            RequestStream(generator, params), itertools.cycle(prompts), hard_or_easy, strategy,
            num_generations=sizes.num_completions,
        )  # fmt: skip
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
