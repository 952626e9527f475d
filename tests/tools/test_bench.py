import time
from collections import Counter

import pytest
import torch
from fast_path import pretend_cuda

import gpu_bench
from cb_rollout.tools.bench.peers.contenders import Contender, generate, ours, transformers_batching
from cb_rollout.tools.bench.peers.vllm_process import PYTHON_VARIABLE
from cb_rollout.tools.bench.profile import WrappedFunction, wrapped
from cb_rollout.tools.bench.roofline import machine
from cb_rollout.tools.bench.roofline.machine import (
    Products,
    matmul_parameters,
    needed_flops,
    num_flops,
    products_counted,
    products_seconds,
)
from cb_rollout.tools.bench.scaling import LONGEST_TURN_SECONDS, _is_feasible
from cb_rollout.tools.bench.table import number_text, print_table, times_better, value_text
from cb_rollout.tools.bench.timing import ResidentPeak, summary, take_turn
from cb_rollout.tools.bench.workload import (
    CPU,
    LLAMA_135M,
    MODELS,
    TINY,
    Workload,
    create_ending_model,
    create_model,
    equal_lengths,
    long_tailed,
)
from cb_rollout.tools.cli import bench as cli_bench


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


def test_the_peak_counts_memory_that_was_freed():
    with ResidentPeak() as peak:
        before = peak.num_bytes
        held = torch.ones(1 << 24)
        peak.sample()
        num_bytes = held.nbytes
        del held
    assert peak.num_bytes >= before + 0.9 * num_bytes


def test_the_needed_products_are_those_of_each_prompt_once_and_of_each_decoded_token():
    model = create_model(TINY.shape, "cpu")
    body, head = matmul_parameters(model)
    workload = Workload([[2, 3, 4], [2, 3, 4], [5, 6]], [1, 3, 2])
    # Prompts of 3 and 2 tokens; 0, 2 and 1 decoded after them.
    assert needed_flops(model, workload) == 2 * (body * (3 + 2 + 3) + head * (2 + 3))


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


def test_completions_end_by_themselves_about_where_they_should():
    model = create_ending_model(TINY.shape, "cpu", 4)
    logits = model(torch.randint(3, 64, (16, 8))).logits
    assert logits.softmax(-1)[..., 1].mean().item() == pytest.approx(1 / 4, rel=0.3)


def test_the_workloads_are_those_of_the_contract():
    tailed, equal = long_tailed(CPU), equal_lengths(CPU)
    assert len(tailed.prompts) == len(equal.prompts) == 128
    assert all(20 <= len(prompt) <= 60 for prompt in tailed.prompts)
    assert tailed.prompts[:8] == [tailed.prompts[0]] * 8
    assert tailed.num_tokens == 5834
    assert max(tailed.lengths) <= 512
    assert equal.num_tokens == 128 * 64
    assert equal.first(3).num_tokens == 3 * 64


def test_the_larger_shape_is_smollm_with_few_tokens():
    assert create_model(LLAMA_135M.shape, "meta").num_parameters() == 134_515_008
    assert create_model(TINY.shape, "cpu").config.model_type == "qwen3"
    tailed, equal = long_tailed(LLAMA_135M), equal_lengths(LLAMA_135M)
    assert len(tailed.prompts) == len(equal.prompts) == 64
    assert (tailed.num_tokens, max(tailed.lengths), equal.num_tokens) == (2606, 171, 2560)


def test_the_command_line_names_every_model():
    assert list(MODELS) == list(cli_bench.MODELS)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("contender", [ours(), transformers_batching(), generate(2)])
def test_a_contender_runs_a_part_of_what_it_was_made_for(contender):
    model, workload = create_model(TINY.shape, "cpu"), long_tailed(TINY)
    turn = take_turn(contender, model, workload, warm_up=workload.first(1))
    assert turn.seconds > 0


def test_a_contender_is_left_out_where_its_turn_would_be_long(capsys):
    workload = Workload([[2]] * 10, [100] * 10)
    limit = workload.num_tokens / LONGEST_TURN_SECONDS
    assert _is_feasible("new", {}, workload)
    assert _is_feasible("fast", {"fast": limit * 1.01}, workload)
    assert not _is_feasible("slow", {"slow": limit * 0.99}, workload)
    assert "slow is left out" in capsys.readouterr().out


def test_ratios_are_of_speed_for_rates_and_for_seconds():
    rates, seconds = (
        [summary([value], unit) for value in (4.0, 2.0)]
        for unit in ("tokens_per_second", "seconds")
    )
    assert times_better(*rates) == 2.0
    assert times_better(*seconds) == 0.5
    assert times_better(rates[0], summary([0.0], "tokens_per_second")) == 0.0


def test_a_table_shows_contenders_against_the_first_and_figures_as_they_are(capsys):
    rows = {"cb_rollout": summary([4.0], "seconds"), "other": summary([8.0], "seconds")}
    print_table({"race": rows, "plain figures": {"a": 1.0, "b": {"x_y": 1234.5}}})
    printed = capsys.readouterr().out
    assert "cb_rollout is 2.00x" in printed
    assert "1,234 x y" in printed


@pytest.mark.parametrize(
    ("value", "text"), [(2419.6, "2,420 tokens/s"), (23.09, "23.1 tokens/s"), (0.5, "0.5 tokens/s")]
)
def test_a_value_has_three_digits(value, text):
    assert value_text(value, "tokens_per_second") == text
    assert text.startswith(number_text(value))


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
