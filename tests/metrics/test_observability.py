import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.metrics.live_metrics import Histogram, exposition
from cb_rollout.metrics.registry import DISTRIBUTIONS, EngineCounters, EngineStatus

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"
DASHBOARD = DOCUMENT.with_name("grafana-dashboard.json")
PACKAGE = DOCUMENT.parents[1] / "cb_rollout"
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=0)
PROMPTS = [[5, 6, 7], [8, 9], [8, 9]]


def exposed(manager):
    return exposition(manager.counters, manager.status(), manager.durations)


@pytest.fixture
def generator():
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0, block_size=8)) as generator:
        yield generator


def exported(record):
    return [entry.name for entry in fields(record) if entry.metadata]


LIVE_NAMES = exported(EngineCounters) + exported(EngineStatus)


def test_prometheus_reads_every_figure(generator):
    generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    generator.sync_weights()
    text = exposed(generator.manager)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = {f"cb_rollout_{name}": "counter" for name in exported(EngineCounters)}
    kinds |= {f"cb_rollout_{name}": "gauge" for name in exported(EngineStatus)}
    kinds |= {f"cb_rollout_{d.name}": "histogram" for d in DISTRIBUTIONS}
    assert {name: family.type for name, family in families.items()} == kinds
    tokens = families["cb_rollout_tokens_generated"].samples[0]
    assert (tokens.name, tokens.value) == ("cb_rollout_tokens_generated_total", 36)
    queue = {
        (s.name, s.labels.get("le")): s.value for s in families["cb_rollout_queue_seconds"].samples
    }
    assert queue["cb_rollout_queue_seconds_count", None] == 3
    assert queue["cb_rollout_queue_seconds_bucket", "+Inf"] == 3
    assert queue["cb_rollout_queue_seconds_sum", None] > 0
    buckets = [v for (name, _), v in queue.items() if name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert families["cb_rollout_policy_version"].samples[0].value == 1
    steps = families["cb_rollout_decode_step_seconds"].samples
    (count,) = [s.value for s in steps if s.name.endswith("_count")]
    assert count == generator.manager.counters.decode_forwards


def test_a_histogram_counts_up_to_and_at_its_bounds():
    histogram = Histogram()
    for value in (0.001, 0.0011, 1e9):
        histogram.record(value)
    counts, total = histogram.read()
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (1, 2, 2, 3)
    assert total == pytest.approx(1e9)


def test_the_dashboard_draws_every_metric_and_no_other(generator):
    board = json.loads(DASHBOARD.read_text())
    drawn = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"cb_rollout_\w+", target.get("expr", ""))
    }
    text = exposed(generator.manager)
    told = set(re.findall(r"^(cb_rollout_\w+)", text, re.MULTILINE))
    assert drawn <= told
    families = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in told}
    assert {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in drawn} == families


def test_the_document_lists_every_name():
    text = DOCUMENT.read_text()
    assert [name for name in LIVE_NAMES if f"`{name}`" not in text] == []
    assert [d.name for d in DISTRIBUTIONS if f"`{d.name}`" not in text] == []


def test_every_name_is_one_of_a_kind():
    names = LIVE_NAMES + [d.name for d in DISTRIBUTIONS]
    assert len(names) == len(set(names))
    assert all(d.name.endswith("_seconds") for d in DISTRIBUTIONS)


def test_the_dashboard_asks_for_spans_and_attributes_that_there_are():
    text = DOCUMENT.read_text()
    board = json.loads(DASHBOARD.read_text())
    queries = [t["query"] for p in board["panels"] for t in p.get("targets", ()) if "query" in t]
    assert len(queries) == 4
    source = "".join(path.read_text() for path in (PACKAGE / "integrations").rglob("*.py"))
    for query in queries:
        for name in re.findall(r'name = "(\w+)"', query):
            assert f"`{name}`" in text
        for name in re.findall(r"span\.([\w.]+)", query):
            assert name.removeprefix("cb_rollout.") in source
