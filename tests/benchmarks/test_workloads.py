"""Every workload of the bench runs, on tiny models."""

import json
import math
import sys

import pytest
from tiny import byte_tokenizer, tiny_model

import bench
import write_docs
from benchmarks.peers.vllm_process import PYTHON_VARIABLE
from benchmarks.profile import OUTSIDE
from benchmarks.sizes import MODELS, TINY
from pages import plots

# The peers emit warnings of their own.
pytestmark = pytest.mark.filterwarnings("default")

# Workloads that take seconds even with tiny models.
SLOW = {
    "bitwise",
    "chats_long",
    "chats_tail",
    "chat_step",
    "deltas",
    "gpu_model",
    "pool",
    "serve",
    "strategies",
    "simulate",
    "rollout",
    "scaling",
    "step",
    "bfloat16",
    "gpu_compiled",
    "profile",
}

TINIEST = ("--tiny", "--repetitions", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Run a workload once, and return its record."""
    folder = tmp_path_factory.mktemp("records")

    def record(workload):
        path = folder / f"{workload}_cpu.json"
        if not path.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv(PYTHON_VARIABLE, raising=False)
                if workload.startswith(("chat", "deltas")):
                    # The real model is tested by itself, in `tests/real_weights/`.
                    patch.setattr("benchmarks.chats.smollm2_folder", lambda: chat_model(folder))
                assert bench.main([workload, *TINIEST, "--output-dir", str(folder)]) == 0
        return json.loads(path.read_text())

    return record


def chat_model(folder):
    path = folder / "model"
    if not path.exists():
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(path)
        model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=8192)
        model.save_pretrained(path)
    return path


def figures(results):
    for value in results.values():
        if isinstance(value, dict):
            yield from figures(value)
        elif not isinstance(value, str) and value is not None:
            yield value


@pytest.mark.fast_cases("roofline")
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in bench.WORKLOADS
    ],
)
def test_a_workload_runs_and_its_record_is_of_finite_figures(workload, recorded):
    record = recorded(workload)
    assert record["bench"] == workload
    assert record["repetitions"] == 1
    found = list(figures(record["results"]))
    assert found
    assert all(math.isfinite(value) for value in found)


@pytest.mark.slow
def test_another_model_has_a_record_and_groups_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setitem(MODELS, "135m", TINY)
    arguments = ["--repetitions", "1", "--device", "cpu", "--output-dir", str(tmp_path)]
    assert bench.main(["sync", "--model", "135m", *arguments]) == 0
    assert bench.main(["sync", "--tiny", *arguments]) == 0
    assert sorted(tmp_path.iterdir()) == [
        tmp_path / "sync_135m_cpu.json", tmp_path / "sync_cpu.json"
    ]  # fmt: skip
    record, default = (json.loads(path.read_text()) for path in sorted(tmp_path.iterdir()))
    assert (record["bench"], *record["results"]) == ("sync_135m", "sync_135m")
    assert (default["bench"], *default["results"]) == ("sync", "sync")


def test_a_tiny_run_never_replaces_a_record(capsys):
    assert bench.main(["roofline", "--tiny"]) == 2
    assert "--output-dir" in capsys.readouterr().err


def test_the_script_writes_where_the_documents_read(monkeypatch, tmp_path):
    folders = []
    monkeypatch.setattr(bench, "run_workload", lambda *given: folders.append(given[-1]))
    assert bench.main(["sync"]) == 0
    assert bench.main(["sync", "--output-dir", str(tmp_path)]) == 0
    assert folders == [write_docs.BENCHMARKS, tmp_path]


def test_a_missing_package_of_a_workload_is_named_with_what_installs_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert bench.main(["serve"]) == 2
    fault = "needs httpx, not installed here: pip install 'cb_rollout[server]' httpx\n"
    assert capsys.readouterr().err.endswith(fault)


@pytest.mark.slow
def test_a_rollout_record_has_each_contenders_share_of_the_bound(recorded):
    for contenders in recorded("rollout")["results"].values():
        for contender in contenders.values():
            assert 0 < contender["matmul_share"] <= contender["forwards_matmul_share"]
            assert contender["forwards_products_share"] > 0
            assert contender["peak_resident_mib"] > 0
            assert contender["settings"]


@pytest.mark.slow
def test_a_profile_accounts_for_the_whole_rollout(recorded):
    results = recorded("profile")["results"]
    parts = results["where the time goes"]
    assert sum(part["percent"] for part in parts.values()) == pytest.approx(100)
    assert sum(part["percent"] for part in results["operators"].values()) == pytest.approx(100)
    uncounted = [name for name, part in parts.items() if not part["calls"]]
    assert uncounted == [OUTSIDE], "functions of profile.FINE are not called any more"


@pytest.mark.slow
def test_the_memory_of_a_waiting_request_is_measured_besides_its_tokens(recorded):
    waiting = recorded("scaling")["results"]["waiting"]
    assert waiting["bytes a request beside its tokens"] > 0
    # 8 in a list of Python, which has an even number of places.
    assert waiting["bytes a token"] >= 7.9


@pytest.mark.slow
def test_the_plots_are_drawn_from_records(recorded, tmp_path):
    record = recorded("scaling")
    step = {"results": {"grpo_step": {"cb_rollout": {"median": 1.0}, "other": {"median": 2.0}}}}
    (tmp_path / "step_cpu.json").write_text(json.dumps(step))
    # A contender may be left out of larger points.
    del record["results"]["2 requests"]["transformers CB"]
    (tmp_path / "scaling_cpu.json").write_text(json.dumps(record))
    plots.main(["--folder", str(tmp_path)])
    assert {path.name for path in tmp_path.glob("*.[ps][nv]g")} == {
        f"{name}_cpu.{form}" for name in ("scaling", "step") for form in ("png", "svg")
    }


@pytest.mark.slow
def test_a_table_of_the_readme_gives_ratio_spread_and_share(recorded):
    record = recorded("rollout")
    contenders = record["results"]["equal_lengths"]
    contenders["cb_rollout"] |= {"median": 300.0, "min": 250.0, "max": 320.0, "matmul_share": 0.5}
    contenders["model.generate"] |= {
        "median": 200.0, "min": 99.5, "max": 210.0, "matmul_share": 0.25
    }  # fmt: skip
    assert "min to max" not in write_docs.workload_table("Equal", contenders, record)
    table = write_docs.workload_table("Equal", contenders, record | {"repetitions": 2})
    assert "| cb_rollout | 300 tokens/s | 250 to 320 | - | 50% |" in table
    assert "| model.generate | 200 tokens/s | 99.5 to 210 | 1.5x as fast | 25% |" in table
    assert "2 turns each" in table
    assert write_docs.SHARES in table
