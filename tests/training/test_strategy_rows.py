"""Strategies train each row of the data set once an epoch, also over a checkpoint."""

from collections import Counter
from dataclasses import dataclass

import pytest
from datasets import Dataset
from tiny_trainer import PROBLEMS, tiny_trainer
from transformers import TrainerCallback
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.strategies import DynamicSampling, OverSampling, PartialRollouts

ROWS = PROBLEMS[:24]
PROMPTS = sorted(row["prompt"] for row in ROWS)
GROUP = 2

# 12 generations of two prompts an epoch; lengths from 1 to 30 tokens.
SETTINGS = {
    "generation_kwargs": {"eos_token_id": list(range(1, 9))},
    "max_completion_length": 30,
    "num_generations": GROUP,
    "per_device_train_batch_size": 2 * GROUP,
    "max_steps": -1,
    "num_train_epochs": 1,
    "save_only_model": False,
    "trainer_arguments": {"train_dataset": Dataset.from_list(ROWS)},
}
GRPO = {}
RLOO = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}
# Two generations a step; a generation of two steps.
ACCUMULATED = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
DIVIDED = {
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "per_device_train_batch_size": GROUP,
}
BOTH = {
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "per_device_train_batch_size": GROUP,
}

AHEAD = [
    PartialRollouts(num_extra_groups=3, max_staleness=3),
    PartialRollouts(num_extra_groups=7, max_staleness=1),
    OverSampling(num_extra_groups=3),
    OverSampling(num_extra_groups=2, num_extra_members=1),
]


@dataclass(frozen=True, kw_only=True)
class Dapo(DynamicSampling, PartialRollouts):
    name = "dapo"


def by_length(completions, **_):
    return [float(len(completion)) for completion in completions]


class StopAt(TrainerCallback):
    """Saves a checkpoint at a step, and ends the training there."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def trained_rows(output_dir, strategy, stop_at=None, resume=None, config=None, **settings):
    """The prompt of each completion that the loss sees, in order, and of each that is scored."""
    scored = []
    reward = settings.pop("reward", by_length)

    def reward_and_note(prompts, completions, **columns):
        scored.extend(prompts[::GROUP])
        return reward(prompts=prompts, completions=completions, **columns)

    trainer = tiny_trainer(output_dir, **(SETTINGS | {"reward": reward_and_note} | settings))
    attach(trainer, RolloutConfig(**({"old_logps": "rollout"} | (config or {}))))
    use_strategy(trainer, strategy)
    if stop_at is not None:
        trainer.add_callback(StopAt(stop_at))
    compute_loss, trained = trainer.compute_loss, []

    def compute_loss_and_note(model, inputs, *rest, **named):
        prompts = zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
        kept = [ids[mask.bool()] for ids, mask in prompts]
        trained.extend(trainer.processing_class.batch_decode(kept))
        return compute_loss(model, inputs, *rest, **named)

    trainer.compute_loss = compute_loss_and_note
    trainer.train(resume_from_checkpoint=resume)
    detach(trainer)
    return trained, scored


def times(number):
    """Counts of an epoch, or of several."""
    return dict.fromkeys(PROMPTS, number * GROUP)


def resumed_rows(tmp_path, strategy, step, **settings):
    """Rows of a run that ends at a step, and goes on from its checkpoint in another trainer."""
    trained, scored = trained_rows(tmp_path, strategy, stop_at=step, **settings)
    checkpoint = str(tmp_path / f"checkpoint-{step}")
    others, others_scored = trained_rows(tmp_path, strategy, resume=checkpoint, **settings)
    return trained + others, scored + others_scored


def test_partial_rollouts_train_each_row_once_an_epoch(tmp_path):
    trained, _ = trained_rows(tmp_path, AHEAD[0], num_train_epochs=2)
    assert Counter(trained[: 24 * GROUP]) == times(1)
    assert Counter(trained) == times(2)


def test_a_run_stopped_amid_an_epoch_trains_each_row_once(tmp_path):
    trained, _ = resumed_rows(tmp_path, AHEAD[0], 5)
    assert Counter(trained) == times(1)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [GRPO, RLOO], ids=["grpo", "rloo"])
@pytest.mark.parametrize("generation", [{}, ACCUMULATED, DIVIDED, BOTH], ids=str)
@pytest.mark.parametrize("strategy", AHEAD, ids=str)
def test_sampling_ahead_trains_each_row_once_an_epoch(tmp_path, strategy, generation, trainer):
    settings = SETTINGS | generation | trainer
    trained, _ = trained_rows(tmp_path, strategy, num_train_epochs=2, **(generation | trainer))
    assert settings["max_steps"] == -1
    assert Counter(trained[: 24 * GROUP]) == times(1)
    assert Counter(trained) == times(2)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [GRPO, RLOO], ids=["grpo", "rloo"])
@pytest.mark.parametrize(
    ("generation", "steps"),
    # In the first epoch, at its end and in the second, never amid a generation.
    [({}, (5, 12, 19)), (ACCUMULATED, (3, 6, 8)), (DIVIDED, (6, 24, 34)), (BOTH, (5, 12, 19))],
    ids=str,
)
@pytest.mark.parametrize("strategy", AHEAD[::2], ids=str)
def test_a_resumed_run_trains_rows_as_often_as_a_whole_one(
    tmp_path, strategy, generation, steps, trainer
):
    for step in steps:
        trained, _ = resumed_rows(
            tmp_path / str(step), strategy, step, num_train_epochs=2, **(generation | trainer)
        )
        assert Counter(trained[: 24 * GROUP]) == times(1)
        assert Counter(trained) == times(2)
