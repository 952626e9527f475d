"""Strategies over a real engine: tokens, versions and log-probabilities of what is kept."""

import copy
import itertools

import pytest
import torch
from tiny import plain_logprobs, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.strategies import (
    DynamicSampling,
    GroupCollector,
    OverSampling,
    PartialRollouts,
    RequestStream,
)

PARAMS = SamplingParams(max_new_tokens=40)


@pytest.fixture
def generator():
    model = tiny_model()
    model.train()
    with RolloutGenerator(model, RolloutConfig(seed=0, block_size=16)) as generator:
        yield generator
        assert generator.manager.engine.num_blocks_used == 0
    assert model.training


def long_first(prompt, outputs):
    return [float(len(output.generated_tokens)) for output in outputs]


def collector_of(generator, strategy, reward=long_first):
    prompts = ([5 + i % 50, 6, 7, 8] for i in itertools.count())
    return GroupCollector(
        RequestStream(generator, PARAMS), prompts, reward, strategy, num_generations=4
    )


@torch.no_grad()
def change(model):
    for parameter in model.parameters():
        parameter.mul_(1.05)


@pytest.mark.parametrize("way", ["edited", "another", "set"])
@pytest.mark.parametrize("strategy", [OverSampling(), PartialRollouts(num_extra_groups=1)])
def test_groups_are_submitted_by_the_generators_present_defaults(generator, strategy, way):
    model = generator.manager.model
    model.generation_config.update(do_sample=True, max_new_tokens=3, eos_token_id=-1)
    prompts = ([5 + i % 50, 6, 7, 8] for i in itertools.count())
    collector = GroupCollector(
        RequestStream(generator), prompts, long_first, strategy, num_generations=4
    )
    for temperature, length in ((0.5, 3), (1.5, 6), (0.75, 4)):
        if way == "edited":
            model.generation_config.update(temperature=temperature, max_new_tokens=length)
        else:
            other = copy.deepcopy(model.generation_config)
            other.update(temperature=temperature, max_new_tokens=length)
            if way == "another":
                model.generation_config = other
            else:
                generator.set_generation_config(other)
        groups = collector.collect(3)
        newest = max(groups, key=lambda group: group.number)
        found = {(output.temperature, len(output.generated_tokens)) for output in newest.outputs}
        assert found == {(temperature, length)}
    collector.close()


def test_over_sampling_leaves_an_idle_engine_and_the_model_as_it_was(generator):
    collector = collector_of(generator, OverSampling(num_extra_groups=3))
    groups = collector.collect(2)
    assert [len(group.outputs) for group in groups] == [4, 4]
    assert not generator.manager.loop.is_live()
    assert generator.manager.model.training
    stats = collector.stats
    assert stats.submitted == 20
    assert (stats.kept, stats.cancelled) == (8, 12)


def test_dynamic_sampling_returns_groups_with_an_advantage(generator):
    def often_equal(prompt, outputs):
        return [float(o.generated_tokens[0] % 2) if prompt[0] % 2 else 1.0 for o in outputs]

    collector = collector_of(generator, DynamicSampling(), often_equal)
    groups = collector.collect(3)
    assert all(len(set(group.rewards)) > 1 for group in groups)
    assert collector.stats.groups_dropped >= 3


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
def test_partial_rollouts_hold_each_token_under_its_own_version(weight_sync):
    model = tiny_model()
    config = RolloutConfig(seed=0, block_size=16, weight_sync=weight_sync)
    with RolloutGenerator(model, config) as generator:
        collector = collector_of(generator, PartialRollouts(num_extra_groups=4, max_staleness=3))
        policies, outputs, num_spanning = [copy.deepcopy(model)], [], 0
        for _ in range(4):
            groups = collector.collect(2)
            assert generator.is_asleep
            outputs += [output for group in groups for output in group.outputs]
            change(model)
            policies.append(copy.deepcopy(model))
            generator.sync_weights()
        collector.close()
        assert not generator.manager.loop.is_live()
    for output in outputs:
        num_spanning += len(output.policy_versions) > 1
        start = 0
        for version, count in output.policy_versions:
            expected = plain_logprobs(policies[version], output.prompt_ids, output.generated_tokens)
            end = start + count
            assert output.logprobs[start:end] == pytest.approx(expected[start:end], abs=1e-5)
            start = end
        assert start == len(output.generated_tokens)
    assert num_spanning
    assert collector.num_in_flight == 0
