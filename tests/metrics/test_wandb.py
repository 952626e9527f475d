import json

import numpy as np
import pytest
import wandb
from wandb_file import rows, table

from cb_rollout.metrics.run_records import SequenceRecord
from cb_rollout.metrics.wandb import (
    COLUMNS,
    MAX_PROMPT_CHARACTERS,
    end_row,
    log_histograms,
    log_token_table,
)


def a_sequence(prompt="2+2="):
    return SequenceRecord(
        step=3,
        mode="train",
        request_id="r0",
        prompt=prompt,
        tokens=["4", "\ud83d", "</s>"],
        token_ids=[19, 7, 2],
        logprobs=[-0.25, float("nan"), -0.5],
        policy_versions=[(6, 1), (7, 2)],
        reward=1.0,
        finish_reason="stop",
        trainer_logprobs=[-0.5, -1.5, -2.5],
        entropies=[1.0, float("nan"), 0.5],
        advantage=-0.75,
        mask=[1, 0, 1],
    )


@pytest.fixture
def offline_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    run = wandb.init(project="cb_rollout", dir=tmp_path)
    yield run
    run.finish()


def logged_tables(tmp_path):
    return sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/rollout/*.table.json"))


def test_tokens_are_logged_as_a_table_in_the_trainers_next_row(tmp_path, offline_run):
    offline_run.log({"reward": 0.5, "train/global_step": 2})
    step_of_next_row = offline_run.step
    log_token_table([a_sequence()], step=3)
    assert offline_run.step == step_of_next_row
    offline_run.log({"reward": 0.6, "train/global_step": 3})
    assert offline_run.step == step_of_next_row + 1
    offline_run.finish()

    (path,) = logged_tables(tmp_path)
    table = json.loads(path.read_text())
    assert table["columns"] == list(COLUMNS)
    assert table["data"] == [
        [3, "r0", "2+2=", 0, "4", -0.25, 6, 1.0, -0.5, 1.0, -0.75, 1],
        [3, "r0", "2+2=", 1, "\\ud83d", None, 7, 1.0, -1.5, None, -0.75, 0],
        [3, "r0", "2+2=", 2, "</s>", -0.5, 7, 1.0, -2.5, 0.5, -0.75, 1],
    ]


def test_a_table_without_a_row_after_it_is_still_written(tmp_path, offline_run):
    log_token_table([a_sequence()], step=3)
    offline_run.finish()
    wandb.teardown()
    (path,) = logged_tables(tmp_path)
    (run_file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert path.name.encode() in run_file.read_bytes()


def test_of_a_long_prompt_the_table_keeps_the_end(tmp_path, offline_run):
    log_token_table([a_sequence(prompt="a" * 9000 + "z" * MAX_PROMPT_CHARACTERS)], step=3)
    offline_run.finish()
    (path,) = logged_tables(tmp_path)
    prompts = {row[2] for row in json.loads(path.read_text())["data"]}
    assert prompts == {"..." + "z" * MAX_PROMPT_CHARACTERS}


def test_histograms_join_the_table_in_the_trainers_next_row(tmp_path, offline_run):
    values = {"rollout/logprobs": [-1.0, -2.0, -2.5], "rollout/logprob_drift": [0.0, 0.0]}
    histograms = {name: np.histogram(own, 4) for name, own in values.items()}
    log_token_table([a_sequence()], step=3)
    log_histograms(histograms)
    offline_run.log({"reward": 0.5})
    offline_run.finish()
    wandb.teardown()
    (row,) = rows(tmp_path)
    assert row["reward"] == 0.5
    assert row["rollout/logprobs"]["values"] == [1, 1, 0, 1]
    assert row["rollout/logprobs"]["bins"] == [-2.5, -2.125, -1.75, -1.375, -1.0]
    assert row["rollout/logprob_drift"]["values"] == [0, 0, 2, 0]
    assert len(table(tmp_path, row["rollout/tokens"])) == 3


def test_a_row_that_nobody_ends_is_ended_and_any_other_is_left(tmp_path, offline_run):
    begun_at = end_row(None)
    assert begun_at == 0
    log_token_table([a_sequence()], step=1)
    begun_at = end_row(begun_at)
    assert begun_at == 1
    log_token_table([a_sequence()], step=2)
    offline_run.log({"reward": 0.5})
    assert end_row(begun_at) == 2
    offline_run.finish()
    wandb.teardown()
    assert ["rollout/tokens" in row for row in rows(tmp_path)] == [True, True]


def test_no_records_log_no_table(tmp_path, offline_run):
    log_token_table([], step=3)
    log_histograms({})
    offline_run.finish()
    assert logged_tables(tmp_path) == []


def test_without_a_run_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert wandb.run is None
    log_token_table([a_sequence()], step=3)
    log_histograms({"rollout/logprobs": np.histogram([-1.0])})
    assert end_row(None) is None
    assert list(tmp_path.iterdir()) == []
