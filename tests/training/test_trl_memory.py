"""A trainer's optimizer is known before it exists, and what its first step took after it."""

import pytest
import torch
from tiny_trainer import tiny_trainer

from cb_rollout import RolloutConfig, attach


def size_of(trainer):
    return sum(p.nbytes for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("settings", "num_states"),
    [({}, 2), ({"optim": "sgd"}, 0), ({"optim": "adafactor"}, 0)],
)
def test_the_reserve_follows_the_trainers_own_optimizer(tmp_path, settings, num_states):
    trainer = tiny_trainer(tmp_path, **settings)
    generator = attach(trainer)
    assert generator.memory_plan().training_reserve_bytes == (1 + num_states) * size_of(trainer)
    generator.close()


def test_an_optimizer_that_the_trainer_was_given_is_taken_at_its_word(tmp_path):
    trainer = tiny_trainer(tmp_path)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1e-3, momentum=0.9)
    generator = attach(trainer)
    assert generator.memory_plan().training_reserve_bytes == 2 * size_of(trainer)
    generator.close()


@pytest.mark.parametrize("release_cache", ["between_steps", "never"])
def test_a_trainers_first_step_is_measured_and_the_plan_made_anew(tmp_path, release_cache):
    trainer = tiny_trainer(tmp_path)
    generator = attach(trainer, RolloutConfig(release_cache=release_cache))
    plan = generator.memory_plan()
    trainer.train()
    measured = generator.memory_plan()
    assert measured is not plan
    training = measured.training
    assert training.is_measured
    assert training.optimizer_states >= 2 * size_of(trainer)
    assert training.gradients_to_come == training.optimizer_states_to_come == 0
    if release_cache == "between_steps":
        assert training.activations == 0, "the cache was away while training took its peak"
    generator.close()
