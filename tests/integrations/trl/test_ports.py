"""The ports of a trainer: whoever has their methods samples, or hears of events."""

import re
from pathlib import Path

import pytest
from tiny_trainer import logged, tiny_trainer

from cb_rollout import ConfigurationError, RolloutConfig, attach, detach
from cb_rollout.integrations.trl import TrainerPart, add_part
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.strategies import OverSampling

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def names_of(block, **given):
    """What a block of Python of the page on extending defines."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[block]
    names = dict(given)
    exec(code, names)
    return names


@pytest.fixture(scope="module")
def source_class():
    return names_of(0)["GenerateSource"]


def test_the_sampler_of_the_docs_trains_as_an_engine_does(tmp_path, source_class):
    trainer = tiny_trainer(tmp_path)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    sampler = attach(trainer, source_class(RolloutConfig(verify_every_steps=1)))
    trainer.train()
    assert sampler.policy_version == 3
    assert len(logged(trainer, "rollout/logprob_drift_max")) == 3
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    changed = [not p.equal(before[name]) for name, p in trainer.model.named_parameters()]
    assert all(changed)
    detach(trainer)


def test_a_sampler_without_a_manager_refuses_strategies(tmp_path, source_class):
    trainer = tiny_trainer(tmp_path)
    attach(trainer, source_class(RolloutConfig()))
    with pytest.raises(ConfigurationError, match=r"GenerateSampler samples whole batches"):
        use_strategy(trainer, OverSampling())
    detach(trainer)


def test_the_part_of_the_docs_hears_of_each_batch_and_of_a_resume(tmp_path):
    trainer = tiny_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=2)
    attach(trainer)
    watch = names_of(2, trainer=trainer)["watch"]
    trainer.train()
    worst = watch.worst
    assert 0.0 < worst < 1.0
    assert all(0.0 <= share <= worst for share in logged(trainer, "repetition"))
    assert len(logged(trainer, "repetition")) == 2
    detach(trainer)

    resumed = tiny_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=2)
    attach(resumed)
    watch = names_of(2, trainer=resumed)["watch"]
    resumed.train(resume_from_checkpoint=True)
    assert watch.worst == worst
    detach(resumed)


class Events(TrainerPart):
    """Notes the order of all events."""

    def __init__(self):
        self.seen = []


def _noting(name):
    def note(self, *_):
        self.seen.append(name)

    return note


EVENTS = [name for name in vars(TrainerPart) if not name.startswith("_")]
for event in EVENTS:
    if event not in ("checkpoint_state", "process_state"):
        setattr(Events, event, _noting(event))


def test_events_come_in_the_order_that_the_docstring_says(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=2)
    attach(trainer)
    part = Events()
    add_part(trainer, part)
    trainer.train()
    detach(trainer)
    rollout = ["begin_rollout", "end_rollout", "scored"]
    micro_batch = ["begin_loss", "computed", "end_loss"]
    step = ["begin_step", *rollout, *micro_batch * 2, "end_step", "log"]
    # transformers logs the figures of the whole training.
    assert part.seen == ["begin_training", *step * 2, "log", "end_training", "close"]


class StepCounter(TrainerPart):
    """Counts steps at their end, in place, as a part that follows steps does."""

    def __init__(self):
        self.counts = {"steps": 0}

    def begin_training(self, step, state):
        if state is not None:
            self.counts = dict(state["counts"])

    def end_step(self, step):
        self.counts["steps"] += 1

    def checkpoint_state(self):
        return {"counts": self.counts}


def test_a_checkpoint_has_the_state_after_its_step_and_none_of_later(tmp_path):
    trainer = tiny_trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=3)
    attach(trainer)
    counter = StepCounter()
    add_part(trainer, counter)
    trainer.train()
    detach(trainer)
    assert counter.counts == {"steps": 3}
    for step in (1, 2):
        resumed = tiny_trainer(tmp_path / "resumed", max_steps=3)
        attach(resumed)
        counter = StepCounter()
        add_part(resumed, counter)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert counter.counts == {"steps": 3}
        detach(resumed)


def test_two_parts_that_keep_one_name_are_refused(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    attach(trainer)
    add_part(trainer, StepCounter())
    add_part(trainer, StepCounter())
    with pytest.raises(ConfigurationError, match="StepCounter keeps counts in a checkpoint"):
        trainer.train()
    detach(trainer)


def test_a_part_that_raises_at_the_end_leaves_a_trainer_that_is_detached(tmp_path):
    class Failing(TrainerPart):
        def close(self):
            raise RuntimeError("no room")

    trainer = tiny_trainer(tmp_path)
    generator = attach(trainer)
    add_part(trainer, Failing())
    with pytest.raises(RuntimeError, match="no room"):
        detach(trainer)
    assert not trainer.use_vllm
    assert not generator.manager.is_running()
    attach(trainer)
    detach(trainer)
