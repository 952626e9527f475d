"""The trace of a trainer's step: rollouts with their requests, tools, sync, loss and guard."""

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode
from playback import TOOLS, double, with_tools
from telemetry import observed, require_within
from tiny_trainer import PROBLEMS, tiny_trainer
from tiny_vision_trainer import vision_trainer

from cb_rollout import RolloutConfig, attach, detach

QUICK = {"per_device_train_batch_size": 8, "num_generations": 4, "optim": "sgd"}


@pytest.fixture
def telemetry():
    with observed() as telemetry:
        yield telemetry


def names_of(spans):
    return [span.name for span in spans]


def test_a_grpo_step_with_tools_is_one_tree(tmp_path, monkeypatch, telemetry):
    def traced_double(number: int) -> int:
        """Doubles a number.

        Args:
            number: any.

        Returns:
            Twice as much.
        """
        with telemetry.tracer.start_as_current_span("inside the tool"):
            return double(number)

    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROBLEMS]
    trainer = tiny_trainer(
        tmp_path,
        reward=lambda completions, **_: [float(len(str(c)) % 3) for c in completions],
        prepare_tokenizer=lambda tokenizer: with_tools(monkeypatch, tokenizer),
        trainer_arguments={"tools": [traced_double], "train_dataset": dataset_of(rows)},
        **(QUICK | TOOLS | {"max_steps": 2}),
    )
    config = RolloutConfig(seed=0, block_size=8, verify_every_steps=1, concurrent_tools=True)
    generator = attach(trainer, config)
    trainer.train()
    num_requests = generator.manager.counters.requests_finished
    detach(trainer)
    steps = telemetry.spans("step")
    assert [step.attributes["cb_rollout.step"] for step in steps] == [1, 2]
    assert [step.attributes["cb_rollout.policy_version"] for step in steps] == [1, 2]
    assert [step.parent for step in steps] == [None, None]
    assert len({step.context.trace_id for step in steps}) == 2
    requests = []
    for step in steps:
        parts = names_of(telemetry.children(step))
        assert parts.count("sync") == 1
        assert parts.count("loss") == 1
        assert parts.count("guard") == 1
        assert parts.count("rollout") > 1
        assert parts.count("sleep") >= 1
        for part in telemetry.children(step):
            require_within(part, step)
        for rollout in telemetry.children(step, "rollout"):
            requests += telemetry.children(rollout, "request")
        calls = telemetry.children(step, "execute_tool traced_double")
        assert calls
        for call in calls:
            assert call.attributes["gen_ai.tool.name"] == "traced_double"
            assert names_of(telemetry.children(call)) == ["inside the tool"]
    assert len(requests) == len(telemetry.spans("request")) == num_requests
    assert telemetry.spans("guard")[0].attributes["cb_rollout.max_drift"] <= 1e-5


def dataset_of(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


def test_steps_are_parts_of_the_callers_span_and_losses_of_their_steps(tmp_path, telemetry):
    trainer = tiny_trainer(tmp_path, max_steps=1, gradient_accumulation_steps=2, **QUICK)
    attach(trainer, RolloutConfig(seed=0))
    with telemetry.tracer.start_as_current_span("experiment") as experiment:
        trainer.train()
        assert trace.get_current_span() is experiment
    detach(trainer)
    (step,) = telemetry.spans("step")
    assert step.parent == experiment.get_span_context()
    losses = telemetry.children(step, "loss")
    assert len(losses) == 2
    assert losses[0].end_time <= losses[1].start_time


def test_an_evaluation_outside_of_a_step_is_no_part_of_one(tmp_path, telemetry):
    trainer = tiny_trainer(tmp_path, max_steps=1, **QUICK)
    attach(trainer, RolloutConfig(seed=0))
    trainer.train()
    (step,) = telemetry.spans("step")
    trainer.evaluate()
    detach(trainer)
    evaluated = [x for x in telemetry.spans("rollout") if x.start_time > step.end_time]
    assert evaluated
    assert [rollout.parent for rollout in evaluated] == [None] * len(evaluated)


def test_a_step_that_fails_ends_as_an_error_and_leaves_no_current_span(tmp_path, telemetry):
    def broken(completions, **_):
        raise ValueError("the reward is broken")

    trainer = tiny_trainer(tmp_path, reward=broken, max_steps=1, **QUICK)
    attach(trainer, RolloutConfig(seed=0))
    with pytest.raises(ValueError, match="the reward is broken"):
        trainer.train()
    assert not trace.get_current_span().get_span_context().is_valid
    detach(trainer)
    (step,) = telemetry.spans("step")
    assert step.status.status_code is StatusCode.ERROR
    assert "the reward is broken" in step.status.description
    assert names_of(telemetry.children(step, "rollout")) == ["rollout"]


def test_a_step_that_fails_in_its_loss_is_an_error_too(tmp_path, telemetry):
    trainer = tiny_trainer(tmp_path, max_steps=1, **QUICK)

    def broken(*_, **__):
        raise ArithmeticError("the loss is broken")

    trainer.compute_loss = broken
    attach(trainer, RolloutConfig(seed=0))
    with pytest.raises(ArithmeticError, match="the loss is broken"):
        trainer.train()
    detach(trainer)
    (step,) = telemetry.spans("step")
    assert step.attributes["error.type"] == "ArithmeticError"


def test_a_trainer_that_is_not_observed_begins_no_span(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, **QUICK)
    attach(trainer, RolloutConfig(seed=0))
    trainer.train()
    detach(trainer)
    with observed() as telemetry:
        assert telemetry.spans() == []


@pytest.mark.slow
def test_a_step_with_images_is_one_tree_too(tmp_path, telemetry):
    trainer = vision_trainer(tmp_path, max_steps=1)
    attach(trainer, RolloutConfig(seed=0, verify_every_steps=1))
    trainer.train()
    detach(trainer)
    (step,) = telemetry.spans("step")
    assert {"rollout", "sync", "loss", "guard"} <= set(names_of(telemetry.children(step)))
    (rollout,) = telemetry.children(step, "rollout")
    requests = telemetry.children(rollout, "request")
    assert len(requests) == rollout.attributes["cb_rollout.sequences"]
    (point,) = telemetry.points("cb_rollout.images_encoded")
    assert point.value > 0
