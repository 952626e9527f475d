"""A loop of one's own that was stopped between two steps collects what it would have collected."""

import io
import itertools
from dataclasses import replace

import pytest
import torch
from nightly import slow_after
from tiny import tiny_model

from cb_rollout import InvalidRequestError, RolloutConfig, RolloutError, RolloutGenerator
from cb_rollout import SamplingParams as Params
from cb_rollout.strategies import (
    DynamicSampling,
    GroupCollector,
    OverSampling,
    PartialRollouts,
    RequestStream,
)

CONFIG = RolloutConfig(seed=3, block_size=8)
PARTIAL = PartialRollouts(num_extra_groups=3, max_staleness=2)
NUM_STEPS = 4


def model_of(step):
    """Return the model after so many steps: each changes its weights."""
    model = tiny_model(num_hidden_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02**step)
    return model


def by_length(prompt, outputs):
    return [float(len(output.generated_tokens)) for output in outputs]


class Loop:
    """A loop of steps, each of which collects two groups and changes the weights."""

    def __init__(self, strategy, state=None, num_generations=4):
        self.step, num_prompts = (0, 0) if state is None else (state["step"], state["num_prompts"])
        self.generator = RolloutGenerator(model_of(self.step), CONFIG)
        self.num_prompts = num_prompts
        self.stream = RequestStream(
            self.generator, Params(max_new_tokens=40, eos_token_id=tuple(range(1, 9)))
        )
        self.collector = GroupCollector(
            self.stream, self.prompts(), by_length, strategy, num_generations=num_generations
        )
        if state is not None:
            self.generator.load_state_dict(state["rollouts"])
            self.collector.load_state_dict(state["groups"])

    def prompts(self):
        for number in itertools.count(self.num_prompts):
            self.num_prompts += 1
            yield {"prompt": [9 + number % 40, 6, 7], "number": number}

    def run(self, num_steps):
        """Return what each step collects."""
        collected = []
        for _ in range(num_steps):
            with self.stream.stepping():
                groups = self.collector.collect(2)
            for group in groups:
                for output in group.outputs:
                    collected.append(
                        (
                            (self.step, group.number, group.prompt["number"]),
                            (output.request_id, output.generated_tokens),
                            (output.policy_versions, output.logprobs),
                        )
                    )
            self.step += 1
            self.generator.manager.model.load_state_dict(model_of(self.step).state_dict())
            self.generator.sync_weights()
        return collected

    def state(self):
        """Return the loop's state as another process reads it."""
        file = io.BytesIO()
        torch.save(
            {
                "step": self.step,
                "num_prompts": self.num_prompts,
                "rollouts": self.generator.state_dict(),
                "groups": self.collector.state_dict(),
            },
            file,
        )
        file.seek(0)
        return torch.load(file, weights_only=True)

    def close(self):
        self.collector.close()
        self.generator.close()


@pytest.mark.parametrize(
    "strategy", slow_after(1, [PARTIAL, OverSampling(), DynamicSampling()]), ids=str
)
def test_a_stopped_loop_collects_what_it_would_have_collected(strategy):
    whole = Loop(strategy)
    expected = whole.run(NUM_STEPS)
    counts = replace(whole.collector.stats)
    whole.close()
    for num_before in range(1, NUM_STEPS):
        stopped = Loop(strategy)
        first = stopped.run(num_before)
        state = stopped.state()
        stopped.close()
        resumed = Loop(strategy, state)
        found = first + resumed.run(NUM_STEPS - num_before)
        assert resumed.collector.stats == counts
        resumed.close()
        for field in (0, 1):
            assert [row[field] for row in found] == [row[field] for row in expected]
        for row, other in zip(found, expected, strict=True):
            assert row[2][0] == other[2][0]
            torch.testing.assert_close(row[2][1], other[2][1], rtol=0, atol=1e-5)


def test_groups_are_carried_with_their_tokens():
    loop = Loop(PARTIAL)
    loop.run(3)
    state = loop.state()
    loop.close()
    saved = state["groups"]["sequences"]["requests"]
    assert sum(len(request["generated_tokens"]) for request in saved) > 0
    # They are the collector's, and not the generator's to hand out.
    assert state["rollouts"]["requests"] == []


@pytest.mark.parametrize(
    ("strategy", "num_generations"),
    [(PARTIAL, 5), (OverSampling(), 4), (PartialRollouts(num_extra_groups=2, max_staleness=2), 4)],
)
def test_a_state_of_other_settings_is_refused_whole(strategy, num_generations):
    loop = Loop(PARTIAL)
    loop.run(1)
    state = loop.state()
    loop.close()
    other = Loop(strategy, num_generations=num_generations)
    with pytest.raises(InvalidRequestError, match=r"the state is of .* and the strategy now is"):
        other.collector.load_state_dict(state["groups"])
    assert other.collector.num_in_flight == 0
    assert len(other.run(1)) == 2 * num_generations
    other.close()


@pytest.mark.parametrize("state", [{}, None, {"format": 0}])
def test_what_is_no_state_of_this_version_is_refused(state):
    loop = Loop(PARTIAL)
    with pytest.raises(InvalidRequestError, match=r"state of the strategy has format .*, and 1 is"):
        loop.collector.load_state_dict(state)
    loop.close()


def test_a_state_is_not_loaded_over_groups_in_flight():
    loop = Loop(PARTIAL)
    loop.run(1)
    state = loop.state()
    with pytest.raises(RolloutError, match="completions are in flight; load a state before"):
        loop.collector.load_state_dict(state["groups"])
    loop.close()
