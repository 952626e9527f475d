"""A training that Ctrl-C ends says in a few lines what is left of it."""

import os
import signal
import traceback

import pytest
from tiny_trainer import share_of_sevens, tiny_trainer

from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.metrics.run_records import read_metrics


class InterruptingReward:
    """Gives rewards, and interrupts the process in its third call, as Ctrl-C does."""

    __name__ = "interrupting"

    def __init__(self):
        self.num_calls = 0

    def __call__(self, completions, **more):
        self.num_calls += 1
        if self.num_calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return share_of_sevens(completions, **more)


def interrupted(tmp_path, **settings):
    trainer = tiny_trainer(tmp_path, reward=InterruptingReward(), **settings)
    attach(trainer, RolloutConfig(seed=0))
    with pytest.raises(KeyboardInterrupt) as error:
        trainer.train()
    return trainer, error.value


@pytest.mark.slow
def test_an_interrupted_training_says_where_its_records_are_and_how_to_resume(tmp_path):
    trainer, error = interrupted(tmp_path, save_strategy="steps", save_steps=1, max_steps=5)
    text = "".join(traceback.format_exception(error))
    assert len(text.splitlines()) <= 12
    assert "after 2 of 5 steps, in __call__ (test_interruption.py, line" in text
    assert f"cb-rollout report {tmp_path}" in text
    assert f"{tmp_path}/checkpoint-2; trainer.train(resume_from_checkpoint=True)" in text
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


def test_every_step_before_an_interruption_is_recorded_and_a_missing_checkpoint_is_said(tmp_path):
    trainer, error = interrupted(tmp_path, logging_steps=10)
    assert [m.step for m in read_metrics(tmp_path)] == [1, 2]
    assert "no checkpoint (save_strategy='no'" in str(error)
    detach(trainer)
    assert "train" not in vars(trainer)


def test_another_error_of_a_training_keeps_its_frames(tmp_path):
    def broken(completions, **_):
        raise ValueError("broken")

    trainer = tiny_trainer(tmp_path, reward=broken)
    attach(trainer, RolloutConfig(seed=0))
    with pytest.raises(ValueError, match="broken") as error:
        trainer.train()
    assert "in broken" in "".join(traceback.format_exception(error.value))
