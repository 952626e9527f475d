import json
import sys
import time
from collections import Counter
from dataclasses import replace
from inspect import signature

import pytest
import torch
from fast_path import pretend_cuda
from torch.nn.attention.varlen import varlen_attn

from benchmarks import attention, grpo, sizes, step
from benchmarks.harness.contenders import Contender
from benchmarks.harness.workload import TINY
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
from cb_rollout.engine.attention.triton import launch
from cb_rollout.tools.bench import Workload, create_model
from gpu import bench as gpu_bench
from gpu import host
from measure import coverage_by_room, speed_floor


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
    steps = [(min(num_rows, 2), path) for num_rows, path in gpu_bench.COMPARED["0.6B"]]
    assert {path for _, path in steps} == gpu_bench.PATHS.keys()
    monkeypatch.setitem(gpu_bench.COMPARED, "0.6B", steps)
    rows = list(gpu_bench.bench_decode("0.6B", small_gpu_bench, peak=1e9))
    assert [row["what"] for row in rows] == [
        f"0.6B decode, {num_rows} rows, {path}" for num_rows, path in steps
    ]
    for row in rows:
        assert "error" not in row
        assert 0 <= row["drift_mean"] <= row["drift_max"] < 1e-3
        assert "ms/step" in gpu_bench.line(row)
        assert "drift" in gpu_bench.line(row)


@pytest.mark.slow
def test_a_decode_step_that_is_wrong_is_an_error_of_its_row_which_is_timed_all_the_same(
    small_gpu_bench, monkeypatch
):
    pretend_cuda(monkeypatch)
    monkeypatch.setitem(gpu_bench.COMPARED, "0.6B", [(2, "kernels")])
    attend = launch.attend

    def shifted(*arguments, **named):
        return attend(*arguments, **named) + 1

    class Late(gpu_bench.RolloutGenerator):
        def generate_batch(self, *arguments, **named):
            # Not while the engine checks its kernels.
            monkeypatch.setattr(launch, "attend", shifted)
            return super().generate_batch(*arguments, **named)

    monkeypatch.setattr(gpu_bench, "RolloutGenerator", Late)
    (row,) = gpu_bench.bench_decode("0.6B", small_gpu_bench, peak=1e9)
    assert row["error"].startswith("is off the plain forward: ")
    assert row["step_ms"] > 0
    assert "is off the plain forward" in gpu_bench.line(row)


@pytest.mark.slow
def test_a_step_is_compiled_for_the_parts_that_come_later(small_gpu_bench, monkeypatch):
    pretend_cuda(monkeypatch)
    (row,) = gpu_bench.bench_compilation("0.6B", small_gpu_bench)
    assert row["what"] == "0.6B compilation"
    assert row["seconds"] > 0
    assert "forwards: compiled" in row["decode_path"]


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


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_grpo_steps_are_timed_in_trls_default_precision_with_the_paths_they_took(monkeypatch):
    pretend_cuda(monkeypatch)
    trainers = []

    class Clock(grpo.GrpoClock):
        def __init__(self, trainer):
            trainers.append(trainer)
            super().__init__(trainer)

    # As on a card.
    on_card = lambda shape, device, _: create_model(shape, device).bfloat16()  # noqa: E731
    monkeypatch.setattr(step, "create_ending_model", on_card)
    monkeypatch.setattr(grpo, "GrpoClock", Clock)
    monkeypatch.setattr(grpo, "SIZES", replace(sizes.TINY, sampled_mean=None))
    monkeypatch.setattr(gpu_bench, "DEVICE", "cpu")
    rows = list(gpu_bench.bench_grpo())
    assert [row["what"] for row in rows] == [
        f"0.6B GRPO step {number} of 3, {path}"
        for path in ("graphs", "graphs, compiled")
        for number in (1, 2, 3)
    ]
    tiny = sizes.TINY
    num_padded = tiny.num_sequences * (tiny.prompt_tokens[1] + tiny.longest_in_step)
    for trainer in trainers:
        assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
        assert trainer.accelerator.mixed_precision == "bf16"
        assert trainer.state.global_step == 3
    for row in rows:
        assert row["graphs"] > 0
        assert "CUDA graphs: on" in row["decode_path"]
        assert ("forwards: compiled" in row["decode_path"]) is row["what"].endswith(", compiled")
        assert 0 < row["sync_seconds"] < row["rollout_seconds"] < row["seconds"]
        assert 0 < row["loss_tokens_useful"] <= row["loss_tokens_computed"] < num_padded
        assert row["prompts_shared"] > 0
        assert 0 <= row["drift_mean"] <= row["drift_max"] < 1
        assert "sync" in gpu_bench.line(row)
    (row,) = gpu_bench.bench_grpo_compilation()
    assert "forwards: compiled" in row["decode_path"]


@pytest.mark.slow
def test_attention_is_timed_alone_by_its_stages(monkeypatch):
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(attention, "LAYERS", 2)
    monkeypatch.setattr(attention, "REPLAYS", 1)
    compiled, attend = [], launch.attend_kernel

    class Watched:
        def __getitem__(self, grid):
            def run(*arguments, **named):
                compiled.append(named["num_stages"])
                return attend[grid](*arguments, **named)

            return run

    monkeypatch.setattr(launch, "attend_kernel", Watched())
    monkeypatch.setattr(attention, "varlen_attn", paged_attention)
    steps = ((1, 1200), (2, 30))
    rows = list(attention.bench_stages("0.6B", TINY.shape, "cpu", 1e9, steps))
    contenders = [f"{stages} stages" for stages in attention.STAGES] + ["PyTorch's varlen_attn"]
    assert [row["what"] for row in rows] == [
        f"0.6B attention, {num_rows} x {tokens} tokens, {contender}"
        for num_rows, tokens in steps
        for contender in contenders
    ]
    # No other stages are left behind, and each is compiled.
    assert list(dict.fromkeys(compiled)) == list(attention.STAGES)
    assert launch.num_stages(1, is_split=True) == 3
    assert all(row["ms"] > 0 for row in rows)


def paged_attention(query, pages, values, *ends, block_table, seqused_k, **named):
    """Softmax attention of each row's only query, with the arguments of torch's kernel."""
    named |= {"block_table": block_table, "seqused_k": seqused_k}
    signature(varlen_attn).bind(query, pages, values, *ends, **named)
    outputs = []
    for row, length in enumerate(seqused_k.tolist()):
        states = [of[block_table[row].long()].flatten(0, 1)[:length] for of in (pages, values)]
        times = query.shape[1] // pages.shape[2]
        keys, own = (one.repeat_interleave(times, 1).float() for one in states)
        scores = torch.einsum("hd,khd->hk", query[row].float(), keys) * query.shape[-1] ** -0.5
        outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), own))
    return torch.stack(outputs).to(query.dtype)


def test_pytorchs_kernel_is_given_every_key_of_each_row(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", paged_attention)
    monkeypatch.setattr(attention, "LAYERS", 1)
    step = attention._VarlenStep(TINY.shape, 3, 300, torch.device("cpu"))
    for pages in step._pages:
        # Of the second page, only the first 44 tokens are a row's.
        last = step._table[:, 1].long()
        pages[last, 300 - 256 :] = float("nan")
    assert step._attend().isfinite().all()
    assert step._table.flatten().sort().values.tolist() == list(range(6))


def test_a_torch_without_a_block_table_is_said_to_be_one(monkeypatch):
    assert attention._varlen_obstacle() is None
    monkeypatch.setattr(attention, "varlen_attn", lambda query, key, value: query)
    assert "has no block table" in attention._varlen_obstacle()


def test_a_part_that_fails_is_a_row_and_an_exit_status_and_the_record_stays_whole(
    monkeypatch, tmp_path
):
    def parts(shape, peak):
        return {"decode": lambda: iter([{"what": "step", "note": "fine"}]), "lifecycle": fail}

    def fail():
        raise RuntimeError("no such device")

    output = tmp_path / "out.json"
    told = ["bench.py", "--shapes", "8B", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", told)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(gpu_bench, "describe_machine", lambda device: {})
    monkeypatch.setattr(gpu_bench, "bandwidth", lambda *_: 1e12)
    monkeypatch.setattr(gpu_bench, "parts", parts)
    with pytest.raises(SystemExit) as ended:
        gpu_bench.main()
    assert ended.value.code == 1
    rows = json.loads(output.read_text())["rows"]
    assert [row["what"] for row in rows] == ["step", "8B lifecycle", "8B peak memory"]
    assert rows[1]["error"] == "RuntimeError: no such device"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_no_part_follows_an_error_that_ends_the_cuda_context(monkeypatch):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    unreached = lambda: iter([{"what": "unreached"}])  # noqa: E731
    parts = {"decode": fail, "lifecycle": unreached}
    monkeypatch.setattr(gpu_bench, "parts", lambda *_: parts)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    rows = list(gpu_bench.bench_shape("8B", 1e12, time.perf_counter() + 100, parts))
    assert [row["what"] for row in rows] == ["8B decode"]
    assert "illegal memory access" in rows[0]["error"]


def test_a_step_must_read_weights_and_keys():
    model = create_model(TINY.shape, "cpu")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    own, shared = 8 * (16 + 80) / 2, 256
    assert gpu_bench.bytes_per_step(model, 8, 10) == weights + (own + shared) * 10


def test_the_processor_time_of_a_step_is_split_over_its_parts(monkeypatch, capsys):
    tiny = {"rows": 4, "group": 2, "prompt": 20, "layers": 1, "steps": 3}
    options = [text for name, value in tiny.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["host.py", *options])
    host.main()
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert first == "4 rows, 1 layers, 3 steps, ms a step"
    assert rows[0].startswith("whole step")
    assert float(rows[0].split()[-1]) > 0
    assert len(rows) == len(host.PARTS) + 2


def test_a_rollout_that_has_lost_half_its_lead_fails(monkeypatch, capsys):
    ratios = {"small": 3.0, "SmolLM2-135M": 1.4}
    monkeypatch.setattr(speed_floor.Race, "ratio", lambda race: ratios[race.name])
    races = [replace(race, recorded=3.0) for race in speed_floor.RACES]
    monkeypatch.setattr(speed_floor, "RACES", races)
    assert speed_floor.main() == 1
    assert "SmolLM2-135M: 1.40 times `generate`, at least 1.50" in capsys.readouterr().out
    ratios["SmolLM2-135M"] = 1.6
    assert speed_floor.main() == 0


def covered(lines, lines_reached, branches, branches_reached):
    return {
        "summary": {
            "num_statements": lines,
            "covered_lines": lines_reached,
            "num_branches": branches,
            "covered_branches": branches_reached,
        }
    }


def test_coverage_is_added_up_by_folder(tmp_path, capsys):
    report = tmp_path / "coverage.json"
    files = {
        "cb_rollout/engine/core.py": covered(60, 60, 20, 10),
        "cb_rollout/engine/model/runner.py": covered(10, 0, 10, 0),
        "cb_rollout/engine/model/layers/head.py": covered(90, 60, 0, 0),
    }
    report.write_text(json.dumps({"files": files}))
    assert coverage_by_room.main([str(report)]) == 0
    printed = capsys.readouterr().out
    assert "| `cb_rollout/engine` | 60 | 20 | 87.5% |" in printed
    assert "| `cb_rollout/engine/model` | 100 | 10 | 54.5% |" in printed
    assert "| **all** | 160 | 30 | 68.4% |" in printed
    assert printed.index("0% of `cb_rollout/engine/model/runner.py`") < printed.index("67% of")
    assert coverage_by_room.main([str(report), "--least", "70"]) == 1
