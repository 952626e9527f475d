"""The trainer's own loggers get the rollout's metrics; the records get all groups' rewards."""

import importlib
import json
import sys

import pytest
from tiny_trainer import logged, tiny_trainer

from cb_rollout import RolloutConfig, attach
from cb_rollout.metrics.run_records import read_metrics

QUICK = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "optim": "sgd"}

# The writer's interface as transformers' callback calls it, into a file of JSON lines.
SUMMARY_WRITER = """
import json
from pathlib import Path

class SummaryWriter:
    def __init__(self, log_dir):
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        self.file = open(Path(log_dir) / "scalars.jsonl", "a")

    def add_scalar(self, name, value, step):
        self.file.write(json.dumps([name, value, step]) + "\\n")

    def add_text(self, name, text, step=None):
        pass

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()
"""


def test_tensorboard_gets_the_rollouts_metrics_of_each_step(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "tensorboardX"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SUMMARY_WRITER)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "tensorboardX", raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    importlib.invalidate_caches()
    trainer = tiny_trainer(tmp_path / "out", report_to=["tensorboard"], **QUICK)
    attach(trainer)
    trainer.train()
    rows = map(json.loads, (tmp_path / "board" / "scalars.jsonl").read_text().splitlines())
    scalars = {(name, step): value for name, value, step in rows}
    for name in ("rollout/tokens", "rollout/policy_version", "rollout/step_share"):
        expected = logged(trainer, name)
        assert [scalars[f"train/{name}", step] for step in (1, 2)] == expected, name


def test_trackio_gets_the_rollouts_metrics_of_each_step(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    trainer = tiny_trainer(
        tmp_path / "out", report_to=["trackio"], project="rollouts", run_name="one",
        trackio_static_space_id=False, **QUICK,
    )  # fmt: skip
    attach(trainer)
    trainer.train()
    rows = SQLiteStorage.get_logs("rollouts", "one")
    found = [row["train/rollout/tokens"] for row in rows if "train/rollout/tokens" in row]
    assert found == logged(trainer, "rollout/tokens")


def test_every_groups_rewards_are_recorded_not_only_of_the_recorded_sequences(tmp_path):
    trainer = tiny_trainer(tmp_path, **QUICK)
    attach(trainer, RolloutConfig(record_num_sequences=1))
    trainer.train()
    steps = [record for record in read_metrics(tmp_path) if "reward" in record.scalars]
    assert len(steps) == 2
    for record in steps:
        assert [len(group) for group in record.group_rewards] == [4, 4]
        rewards = [reward for group in record.group_rewards for reward in group]
        assert sum(rewards) / 8 == pytest.approx(record.scalars["reward"], abs=1e-6)
        alike = [len(set(group)) == 1 for group in record.group_rewards]
        assert sum(alike) / 2 == record.scalars["frac_reward_zero_std"]
