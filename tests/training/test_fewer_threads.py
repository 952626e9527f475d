"""An attached trainer trains with fewer of torch's threads while other processes use the cores."""

import pytest
import torch
from tiny_trainer import share_of_sevens, tiny_trainer

from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.engine.service import thread_share
from cb_rollout.engine.service.thread_share import Clocks


@pytest.fixture
def busy_machine(monkeypatch):
    """Two cores, of which other processes use both."""
    now = 0.0

    def read():
        nonlocal now
        now += 1.0
        return Clocks(now=now, used=4.0 * now, used_here=2.0 * now)

    monkeypatch.setattr(thread_share, "clocks", read)
    monkeypatch.setattr(thread_share, "usable_cores", lambda: range(2))
    monkeypatch.setattr(thread_share, "WINDOW_SECONDS", -1e9)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_losses_run_on_fewer_threads_and_the_training_gives_them_back(tmp_path, busy_machine):
    trainer = tiny_trainer(tmp_path)
    attach(trainer, RolloutConfig(num_blocks=64))
    numbers = []
    compute_loss = trainer.compute_loss

    def noting(*arguments, **named):
        numbers.append(torch.get_num_threads())
        return compute_loss(*arguments, **named)

    trainer.compute_loss = noting
    trainer.train()
    assert numbers
    assert set(numbers) == {1}
    assert torch.get_num_threads() == 2
    detach(trainer)


def noting_reward(numbers, fails_at=None):
    """A reward that notes the threads of each call, and may fail at one of them."""

    def reward(completions, **columns):
        numbers.append(torch.get_num_threads())
        if len(numbers) == fails_at:
            raise ValueError("no reward")
        return share_of_sevens(completions, **columns)

    return reward


def test_an_error_in_a_training_gives_them_back(tmp_path, busy_machine):
    numbers = []
    trainer = tiny_trainer(tmp_path, reward=noting_reward(numbers, fails_at=2))
    attach(trainer, RolloutConfig(num_blocks=64))
    with pytest.raises(ValueError, match="no reward"):
        trainer.train()
    assert numbers == [1, 1]
    assert torch.get_num_threads() == 2
    detach(trainer)


def test_a_bitwise_training_keeps_them(tmp_path, busy_machine):
    numbers = []
    trainer = tiny_trainer(tmp_path, reward=noting_reward(numbers))
    attach(trainer, RolloutConfig(num_blocks=64, numerics="bitwise"))
    trainer.train()
    assert set(numbers) == {2}
    detach(trainer)
