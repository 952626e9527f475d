"""A loop of one's own records what `attach` records of the same rollouts."""

from dataclasses import asdict

import numpy as np
import pytest
import wandb
from tiny_trainer import tiny_trainer
from transformers import TrainerCallback
from wandb_file import rows, table

from cb_rollout import RolloutConfig, attach
from cb_rollout.integrations.trl.rows.loss_rows import ROWS_KEY
from cb_rollout.metrics.run_records import iterate_rollouts, read_metrics
from cb_rollout.rollout.recording.distributions import DRIFT, LOGPROBS, NUM_BINS, RATIO
from cb_rollout.tools.report.figures import DRIFT_KEYS, PANELS, series

# Panels of what a loop gives; entropies and staleness are a trainer's.
SHARED = ("Reward", "Groups", "Length of completions", "Throughput")


class Loop(TrainerCallback):
    """Records each step of an attached trainer a second time, as a loop of one's own would."""

    def __init__(self, trainer, generator, output_dir):
        self.trainer, self.generator, self.output_dir = trainer, generator, output_dir
        self.trained, self.advantages = {}, {}
        self.steps = []
        self._inputs = None
        compute_loss = trainer.compute_loss
        logprobs = trainer._get_per_token_logps_and_entropies

        def computed(model, inputs, *rest, **named):
            self._inputs = inputs
            try:
                return compute_loss(model, inputs, *rest, **named)
            finally:
                self._inputs = None

        def kept(*arguments, **named):
            result = logprobs(*arguments, **named)
            if self._inputs is not None:
                inputs = self._inputs
                for number, row in enumerate(inputs[ROWS_KEY]):
                    values = result[0].detach()[number, : len(row.completion_ids)]
                    self.trained[row.name] = values.clone()
                    self.advantages[row.name] = inputs["advantages"][number].item()
            return result

        trainer.compute_loss = computed
        trainer._get_per_token_logps_and_entropies = kept
        trainer.add_callback(self)

    def on_step_end(self, *_, **__):
        context = self.trainer.vllm_generation.context
        rewards = dict(zip((row.name for row in context.rows), context.rewards, strict=True))
        outputs = context.outputs
        names = [output.request_id for output in outputs]
        trained = [self.trained[name] for name in names]
        self.steps.append((outputs, trained))
        self.generator.record(
            outputs,
            [rewards[name] for name in names],
            [self.advantages[name] for name in names],
            trained,
            output_dir=self.output_dir,
        )


def trained_twice_recorded(tmp_path, num_sequences=16, **settings):
    trainer = tiny_trainer(tmp_path / "attached", **settings)
    config = RolloutConfig(record_num_sequences=num_sequences, verify_every_steps=0)
    with attach(trainer, config) as generator:
        loop = Loop(trainer, generator, tmp_path / "loop")
        trainer.train()
    return loop


def lines(folder):
    """Records by step and request, without entropies, which a loop does not give."""
    return {
        (record.step, record.request_id): asdict(record) | {"entropies": []}
        for record in iterate_rollouts(folder)
    }


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loop_records_of_a_rollout_what_attach_does(tmp_path, accumulation):
    trained_twice_recorded(
        tmp_path,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=16 // accumulation,
    )
    attached, own = lines(tmp_path / "attached"), lines(tmp_path / "loop")
    assert len(attached) == 3 * 16
    assert own == attached
    assert all(record["trainer_logprobs"] for record in own.values())


def test_the_report_of_a_loop_has_the_figures_of_an_attached_trainer(tmp_path):
    trained_twice_recorded(tmp_path, num_sequences=4)
    attached, own = read_metrics(tmp_path / "attached"), read_metrics(tmp_path / "loop")
    panels = {panel.title: panel for panel in PANELS}
    for title in SHARED:
        panel = panels[title]
        curves = [panel.curve, *([panel.spread] if panel.spread else [])]
        for curve in curves:
            theirs = np.array(curve(attached))
            assert len(theirs) == 3, title
            assert np.array(curve(own)) == pytest.approx(theirs, rel=1e-5), title
    names = ("reward", "reward_std", "frac_reward_zero_std", "rollout/tokens",
             *(f"completions/{word}_{name}" for word in ("min", "max", "mean")
               for name in ("length", "terminated_length")),
             "completions/clipped_ratio", "rollout/policy_version", DRIFT_KEYS[1])  # fmt: skip
    for name in names:
        theirs = dict(series(attached, name))
        assert len(theirs) == 3, name
        assert dict(series(own, name)) == pytest.approx(theirs, rel=1e-5, abs=1e-6), name


@pytest.mark.slow
def test_under_attach_wandb_gets_histograms_of_all_tokens_beside_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_WATCH", "false")
    monkeypatch.chdir(tmp_path)
    run = wandb.init(project="cb_rollout", dir=tmp_path, mode="offline")
    trainer = tiny_trainer(
        tmp_path / "out", report_to=["wandb"], max_steps=2, eval_strategy="steps", eval_steps=1
    )
    with attach(trainer, RolloutConfig(record_num_sequences=2)) as generator:
        loop = Loop(trainer, generator, tmp_path / "loop")
        # A run of its own would be recorded in wandb too.
        monkeypatch.setattr(generator, "record", lambda *_, **__: None)
        trainer.train()
    run.finish()
    wandb.teardown()
    shown = [row for row in rows(tmp_path) if LOGPROBS in row]
    assert len(shown) == 2
    for step, (row, (outputs, trained)) in enumerate(zip(shown, loop.steps, strict=True), 1):
        assert row["train/global_step"] == step
        sampled = np.array([value for output in outputs for value in output.logprobs])
        theirs = np.array([value for values in trained for value in values.tolist()])
        assert len(sampled) > 16
        expected = {LOGPROBS: sampled, DRIFT: sampled - theirs, RATIO: np.exp(theirs - sampled)}
        for name, values in expected.items():
            counts, edges = np.histogram(values, NUM_BINS)
            assert row[name]["values"] == counts.tolist(), name
            assert row[name]["bins"] == pytest.approx(edges.tolist()), name
        tokens = table(tmp_path, row["rollout/tokens"])
        assert len({cell["request_id"] for cell in tokens}) == 2
    evaluated = [row for row in rows(tmp_path) if "eval/reward" in row]
    assert evaluated
    assert not any({DRIFT, RATIO} & set(row) for row in evaluated)
