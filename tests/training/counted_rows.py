"""Counts how often each row of a data set is trained under a strategy."""

from datasets import Dataset
from tiny_trainer import PROBLEMS, tiny_trainer
from transformers import TrainerCallback

from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.integrations.trl.strategies import use_strategy

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
    "trainer_arguments": {"train_dataset": Dataset.from_list(ROWS)},
}


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
