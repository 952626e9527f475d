import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from cb_rollout.metrics.registry import METRICS

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"rollout/[a-z_0-9]+")
REGISTRY = ROOT / "cb_rollout" / "metrics" / "names.py"


def names_in(path):
    """Every string of a file that is a metric's name, whole."""
    nodes = ast.walk(ast.parse(path.read_text()))
    strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {text for text in strings if NAME.fullmatch(text)}


def logged_names():
    files = [path for path in (ROOT / "cb_rollout").rglob("*.py") if path != REGISTRY]
    return set().union(*map(names_in, files))


def test_every_name_that_is_logged_has_an_entry_and_every_entry_is_logged():
    registered = [metric.name for metric in METRICS]
    assert len(registered) == len(set(registered))
    assert set(registered) == logged_names()


def test_every_entry_is_whole_sentences():
    for metric in METRICS:
        assert metric.meaning.endswith("."), metric.name
        assert metric.advice.endswith("."), metric.name
        assert all(metric), metric.name


def test_every_metric_is_in_one_wandb_panel():
    command = [sys.executable, str(ROOT / "scripts" / "wandb_panels.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    drawn = [
        name
        for section in json.loads(done.stdout)["sections"]
        for panel in section["panels"]
        for name in panel["y"]
    ]
    assert {f"train/{metric.name}" for metric in METRICS} <= set(drawn)
    assert len(drawn) == len(set(drawn))
