import time
from collections import Counter

import pytest
import torch
from fast_path import pretend_cuda

import gpu_bench
from benchmarks.peers.vllm_process import PYTHON_VARIABLE
from benchmarks.profile import WrappedFunction, wrapped
from benchmarks.roofline import machine
from benchmarks.roofline.machine import (
    Products,
    matmul_parameters,
    num_flops,
    products_counted,
    products_seconds,
)
from benchmarks.scaling import LONGEST_TURN_SECONDS, _is_feasible
from cb_rollout.tools.bench.contenders import Contender
from cb_rollout.tools.bench.workload import (
    TINY,
    Workload,
    create_model,
)


class Kitchen:
    def cook(self):
        self.chop()
        self.chop()
        time.perf_counter()

    def chop(self):
        pass


def test_time_counts_for_the_innermost_wrapped_function_only():
    plain = Kitchen.cook, Kitchen.chop
    functions = [WrappedFunction(name, Kitchen, name) for name in ("cook", "chop")]
    with wrapped(functions) as spans:
        Kitchen().cook()
        Kitchen().chop()
    assert spans.calls == {("cook",): 1, ("cook", "chop"): 2, ("chop",): 1}
    assert spans.within("cook", "chop") == pytest.approx(sum(spans.seconds.values()))
    assert spans.within("chop") < spans.within("cook", "chop")
    assert (Kitchen.cook, Kitchen.chop) == plain


def test_time_ends_where_a_wrapped_function_raises():
    class Failing:
        def run(self):
            raise ValueError

    with wrapped([WrappedFunction("run", Failing, "run")]) as spans:
        with pytest.raises(ValueError):  # noqa: PT011  there is nothing to match
            Failing().run()
        assert spans._path == ()


def test_a_function_that_is_gone_raises():
    functions = [WrappedFunction("fry", Kitchen, "fry")]
    with pytest.raises(AttributeError, match="fry"), wrapped(functions):
        pass


def test_products_are_counted_inside_the_context_only():
    model = create_model(TINY.shape, "cpu")
    body, head = matmul_parameters(model)
    ids = torch.tensor([[2, 3, 4], [5, 6, 7]])
    with products_counted(model) as counted:
        model(ids, logits_to_keep=1)
    assert counted == {Products(False, 6): 1, Products(True, 2): 1}
    assert num_flops(model, counted) == 2 * (6 * body + 2 * head)
    model(ids)
    assert counted.total() == 2


def test_the_time_of_products_is_interpolated(monkeypatch):
    model = create_model(TINY.shape, "cpu")
    times = {False: 2.0, True: 0.5}
    monkeypatch.setattr(
        machine, "_best_kernel_seconds", lambda _, asked: times[asked.is_head] * asked.num_rows
    )
    counted = Counter({Products(False, 3): 10, Products(False, 70): 1, Products(True, 3): 4})
    assert products_seconds(model, counted) == pytest.approx(2 * (30 + 70) + 0.5 * 12)


def test_a_contender_is_left_out_where_its_turn_would_be_long(capsys):
    workload = Workload([[2]] * 10, [100] * 10)
    limit = workload.num_tokens / LONGEST_TURN_SECONDS
    assert _is_feasible("new", {}, workload)
    assert _is_feasible("fast", {"fast": limit * 1.01}, workload)
    assert not _is_feasible("slow", {"slow": limit * 0.99}, workload)
    assert "slow is left out" in capsys.readouterr().out


@pytest.fixture
def small_gpu_bench(monkeypatch):
    """Shrink the parts of the GPU's bench that run anywhere."""
    monkeypatch.setattr(gpu_bench, "PROMPT", 3)
    monkeypatch.setattr(gpu_bench, "GROUP", 1)
    monkeypatch.setattr(gpu_bench, "SHORT", 1)
    monkeypatch.setattr(gpu_bench, "LONG", 2)
    monkeypatch.setattr(gpu_bench, "ROWS", 2)
    monkeypatch.setattr(gpu_bench, "long_tailed_lengths", lambda *_: [3] * 16)
    return create_model(TINY.shape, "cpu", num_hidden_layers=1)


@pytest.mark.slow
def test_a_decode_step_is_timed_on_every_path_of_a_gpu(small_gpu_bench, monkeypatch):
    pretend_cuda(monkeypatch)
    compared = {2: tuple(gpu_bench.PATHS), 1: gpu_bench.COMPARED["0.6B"][1]}
    monkeypatch.setitem(gpu_bench.COMPARED, "0.6B", compared)
    rows = list(gpu_bench.bench_decode("0.6B", small_gpu_bench, peak=1e9))
    assert [row["what"] for row in rows] == [
        f"0.6B decode, {num_rows} rows, {path}"
        for num_rows in compared
        for path in compared[num_rows]
    ]
    assert all("ms/step" in gpu_bench.line(row) for row in rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_rollout_is_timed_beside_the_peers_on_a_gpu_and_one_that_fails_stops_none(
    small_gpu_bench, monkeypatch
):
    def fail(*_):
        raise RuntimeError("no such attention")

    broken = Contender(fail, "fails")
    monkeypatch.setattr(gpu_bench, "transformers_batching", lambda **_: broken)
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    rows = list(gpu_bench.bench_peers(small_gpu_bench))
    assert [row["what"].split(": ")[1] for row in rows] == [
        *("cb_rollout", "transformers CB", "model.generate"),
        *("cb_rollout", "model.generate"),
    ]
    assert gpu_bench.line(rows[1]).endswith("RuntimeError: no such attention")
    assert all(row["tokens_per_second"] > 0 for row in rows[:1] + rows[2:])
    assert list(gpu_bench.bench_vllm(small_gpu_bench)) == []


def test_a_step_must_read_weights_and_keys():
    model = create_model(TINY.shape, "cpu")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    own, shared = 8 * (16 + 80) / 2, 256
    assert gpu_bench.bytes_per_step(model, 8, 10) == weights + (own + shared) * 10
