"""What a training leaves in its records: each step, whatever the trainer logs, and its settings."""

import pytest
from report_page import Page
from tiny_trainer import logged, tiny_trainer
from transformers.utils.notebook import NotebookProgressCallback

from cb_rollout import RolloutConfig, attach
from cb_rollout.metrics.run_records import list_runs, read_metrics
from cb_rollout.tools.report import write_report

BY_STEP = ("reward", "completions/mean_length", "entropy", "step_seconds", "memory_gib")


def recorded(tmp_path, **settings):
    trainer = tiny_trainer(tmp_path, **settings)
    attach(trainer, RolloutConfig(seed=0))
    trainer.train()
    return read_metrics(tmp_path)


@pytest.fixture(scope="module")
def every_step(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("every"), logging_steps=1)


@pytest.mark.parametrize("logging_steps", [2, 10])
def test_each_step_is_recorded_as_it_was_whatever_the_trainer_logs(
    tmp_path, every_step, logging_steps
):
    metrics = [m for m in recorded(tmp_path, logging_steps=logging_steps) if m.completion_lengths]
    wanted = [m for m in every_step if m.completion_lengths]
    assert [m.step for m in metrics] == [1, 2, 3]
    for own, other in zip(metrics, wanted, strict=True):
        assert own.completion_lengths == other.completion_lengths
        for name in ("reward", "reward_std", "entropy", "num_tokens", "learning_rate"):
            assert own.scalars[name] == pytest.approx(other.scalars[name], rel=1e-6), name
        assert own.scalars.keys() >= set(BY_STEP)


def test_a_run_shorter_than_logging_steps_has_curves_and_says_which_are_missing(tmp_path):
    recorded(tmp_path, logging_steps=10)
    html = write_report(tmp_path).read_text()
    for title in ("Reward", "Entropy", "Learning rate", "Step time", "Memory"):
        assert f"<h2>{title}</h2>" in html
    text = Page(html).text
    assert "logging_steps=10" in text
    assert "loss and grad_norm" in text


def test_a_report_names_the_settings_and_the_versions_of_its_run(tmp_path):
    recorded(tmp_path, learning_rate=3e-4)
    text = Page(write_report(tmp_path).read_text()).text
    for said in ("learning_rate", "0.0003", "transformers", "share_of_sevens", "GRPOTrainer"):
        assert said in text
    (run,) = list_runs(tmp_path)
    assert run.steps == [1, 2, 3]


class KeptTable(NotebookProgressCallback):
    """Keeps the table that a notebook shows."""

    def on_train_end(self, *args, **kwargs):
        self.table = self.training_tracker.inner_table
        super().on_train_end(*args, **kwargs)


def test_a_notebook_shows_the_reward_beside_the_loss(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2)
    notebook = KeptTable()
    trainer.add_callback(notebook)
    attach(trainer, RolloutConfig(seed=0))
    trainer.train()
    columns, *rows = notebook.table
    assert columns[:3] == ["Step", "Training Loss", "Reward"]
    assert [row[columns.index("Reward")] for row in rows] == logged(trainer, "reward")
    assert [row[0] for row in rows] == [1, 2]


def test_a_training_of_text_logs_no_metric_of_images_or_of_offloading(every_step):
    names = every_step[0].scalars.keys()
    assert "rollout/preemptions" in names
    assert not [name for name in names if "images" in name or "offloaded" in name]
