import csv
import io
import re
from urllib.parse import unquote

import pytest
from report_page import Page, a_sequence

from cb_rollout.metrics.run_records import RunRecorder, StepMetrics, list_runs
from cb_rollout.metrics.run_settings import SETTINGS_FILE, is_secret, read_settings
from cb_rollout.tools.report import write_comparison, write_report
from cb_rollout.tools.report.data import MAX_CELLS, csv_text

CURVES = {
    "Loss": "loss",
    "KL divergence": "kl",
    "Gradient norm": "grad_norm",
    "Learning rate": "learning_rate",
    "Step time": "step_seconds",
    "Memory": "memory_gib",
    "Reward: is_right": "rewards/is_right/mean",
    "Reward: is_short": "rewards/is_short/mean",
}


def record(folder, settings=None, num_steps=3):
    describe_run = None if settings is None else (lambda: settings)
    recorder = RunRecorder(folder, describe_run)
    for step in range(1, num_steps + 1):
        scalars = {key: step + number / 8 for number, key in enumerate(CURVES.values())}
        recorder.record_metrics(StepMetrics(step, "train", scalars, [3]))
    return recorder


@pytest.mark.parametrize(("title", "key"), CURVES.items())
def test_what_a_colleague_asks_for_has_a_curve_with_its_values(tmp_path, title, key):
    record(tmp_path)
    html = write_report(tmp_path).read_text()
    figure = next(part for part in html.split("<figure")[1:] if f"<h2>{title}</h2>" in part)
    value = 3 + list(CURVES.values()).index(key) / 8
    assert f"step 3: {value:.3g}" in figure


def test_one_reward_function_has_no_figure_beside_the_reward(tmp_path):
    scalars = {"reward": 0.5, "rewards/is_right/mean": 0.5, "rewards/is_right/std": 0.1}
    RunRecorder(tmp_path).record_metrics(StepMetrics(1, "train", scalars, []))
    assert "Reward: is_right" not in write_report(tmp_path).read_text()


def saved_rows(html):
    (text,) = re.findall(r'href="data:text/csv;charset=utf-8,([^"]*)"', html)
    return list(csv.DictReader(io.StringIO(unquote(text))))


def test_the_numbers_are_inside_the_page_as_a_table_to_save(tmp_path):
    recorder = record(tmp_path)
    recorder.record_metrics(StepMetrics(3, "eval", {'eval_"reward",<b>': 0.25}, []))
    rows = saved_rows(write_report(tmp_path).read_text())
    assert [(row["step"], row["mode"]) for row in rows] == [
        ("1", "train"), ("2", "train"), ("3", "eval"), ("3", "train")
    ]  # fmt: skip
    assert float(rows[1]["kl"]) == 2.125
    assert rows[2]['eval_"reward",<b>'] == "0.25"
    assert rows[2]["kl"] == ""


def test_of_a_long_run_evenly_many_steps_are_saved_and_said():
    num_steps = MAX_CELLS // 10
    metrics = [
        StepMetrics(step, "train", {f"m{i}": float(i) for i in range(20)}, [])
        for step in range(num_steps)
    ]
    text, num_rows, num_all = csv_text(metrics)
    assert num_all == num_steps
    assert num_steps / 3 < num_rows <= num_steps / 2
    assert len(text.splitlines()) == num_rows + 1


SETTINGS = {"Trainer": {"learning_rate": 1e-4, "prompt": "</td><b>"}, "Versions": {"torch": "2.13"}}


def test_a_run_has_its_own_settings_and_they_are_never_run(tmp_path):
    first = record(tmp_path, SETTINGS)
    second = record(tmp_path, {"Trainer": {"learning_rate": 3e-4}})
    assert read_settings(tmp_path, first.run_id)["Versions"] == {"torch": "2.13"}
    assert read_settings(tmp_path, second.run_id) == {"Trainer": {"learning_rate": "0.0003"}}
    html = write_report(tmp_path, first.run_id).read_text()
    text = Page(html).text
    assert "0.0001" in text
    assert "</td><b>" in text
    assert "0.0003" not in text
    html = write_comparison(tmp_path, tmp_path, [first.run_id, None]).read_text()
    assert "learning_rate0.00010.0003" in Page(html).text


def test_a_run_without_steps_leaves_no_settings(tmp_path):
    RunRecorder(tmp_path, lambda: SETTINGS)
    assert not (tmp_path / SETTINGS_FILE).exists()
    record(tmp_path)
    assert len(list_runs(tmp_path)) == 1


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *(("hub_token", True), ("push_to_hub_token", True), ("wandb_api_key", True)),
        *(("Authorization", True), ("set-cookie", True)),
        *(("max_batch_tokens", False), ("stop_token_ids", False), ("learning_rate", False)),
    ],
)
def test_a_secret_is_told_by_its_name(name, is_one):
    assert is_secret(name) is is_one


def test_steps_are_counted_without_the_evaluation_before_training(tmp_path):
    recorder = RunRecorder(tmp_path)
    recorder.record_sequence(a_sequence(0, mode="eval"))
    for step in range(1, 41):
        recorder.record_metrics(StepMetrics(step, "train", {"reward": 0.5}, [2]))
        recorder.record_sequence(a_sequence(step))
    text = Page(write_report(tmp_path).read_text()).text
    assert "Steps40from 1 to 40" in text
    assert "From 2 of 40 recorded steps, and before the first" in text
