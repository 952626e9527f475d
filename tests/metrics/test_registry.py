import ast
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from documented import block, run

from cb_rollout.integrations.trl.packed_loss import LossTokens
from cb_rollout.metrics.registry import (
    EngineCounters,
    EngineStatus,
    rollout_metrics,
    status_metrics,
)
from pages.metrics_table import HISTOGRAMS, METRICS

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"rollout/[a-z_0-9]+")


def names_in(path):
    """Return the strings of a file that are a metric's name."""
    nodes = ast.walk(ast.parse(path.read_text()))
    strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {text for text in strings if NAME.fullmatch(text)}


def logged_names():
    files = (ROOT / "cb_rollout").rglob("*.py")
    computed = set(rollout_metrics(EngineCounters(), 1.0))
    computed |= set(status_metrics(EngineStatus(0, 0, 0, 0, 0, 0)))
    computed |= {f"rollout/{field.name}" for field in fields(LossTokens)}
    return computed.union(*map(names_in, files))


def require_logged(metrics):
    registered = [metric.name for metric in metrics]
    assert len(registered) == len(set(registered))
    assert set(registered) == logged_names()


def require_sentences(metrics):
    for metric in metrics:
        assert metric.meaning.endswith("."), metric.name
        assert metric.advice.endswith("."), metric.name
        assert metric.unit, metric.name
        assert metric.panel, metric.name


def test_every_name_that_is_logged_has_an_entry_and_every_entry_is_logged():
    require_logged([*METRICS, *HISTOGRAMS])


def test_every_entry_is_whole_sentences():
    require_sentences([*METRICS, *HISTOGRAMS])


def test_a_new_metric_is_one_entry_which_must_be_logged():
    added = run(block("Add a metric"))["metric"]
    require_sentences([added])
    with pytest.raises(AssertionError, match=added.name):
        require_logged([*METRICS, *HISTOGRAMS, added])


def test_every_metric_is_in_one_wandb_panel():
    command = [sys.executable, str(ROOT / "scripts" / "pages" / "wandb_panels.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    drawn = [
        name
        for section in json.loads(done.stdout)["sections"]
        for panel in section["panels"]
        for name in panel["y"]
    ]
    assert {f"train/{metric.name}" for metric in METRICS} <= set(drawn)
    assert len(drawn) == len(set(drawn))


def test_a_difference_is_what_was_added_and_the_peak_is_carried_over():
    earlier = EngineCounters(tokens_generated=10, preemptions=1, kv_blocks_peak=7)
    now = EngineCounters(tokens_generated=25, preemptions=1, prefill_tokens=5, kv_blocks_peak=7)
    assert now.since(earlier) == EngineCounters(
        tokens_generated=15, prefill_tokens=5, kv_blocks_peak=7
    )


def test_a_copy_stands_still():
    counters = EngineCounters(tokens_generated=10)
    copy = counters.copy()
    counters.tokens_generated += 5
    assert copy == EngineCounters(tokens_generated=10)


def test_every_counter_is_subtracted_but_the_peak():
    names = [field.name for field in fields(EngineCounters)]
    now = EngineCounters(**{name: 10 + i for i, name in enumerate(names)})
    difference = now.since(EngineCounters(**dict.fromkeys(names, 10)))
    for i, name in enumerate(names):
        expected = 10 + i if name == "kv_blocks_peak" else i
        assert getattr(difference, name) == expected
