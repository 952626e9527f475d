import json
import subprocess
import sys

import pytest
import torch

import bench
from benchmarks.harness.contenders import generate, ours, transformers_batching
from benchmarks.harness.records import summary
from benchmarks.harness.table import number_text, print_table, times_better, value_text
from benchmarks.harness.timing import ResidentPeak, take_turn
from benchmarks.harness.workload import CPU, LLAMA_135M, MODELS, TINY, equal_lengths, long_tailed
from benchmarks.models import create_ending_model
from benchmarks.roofline.machine import matmul_parameters, needed_flops
from cb_rollout.tools.bench import Workload, create_model


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


def test_the_larger_shape_is_smollm_with_few_tokens():
    assert create_model(LLAMA_135M.shape, "meta").num_parameters() == 134_515_008
    assert create_model(TINY.shape, "cpu").config.model_type == "qwen3"
    tailed, equal = long_tailed(LLAMA_135M), equal_lengths(LLAMA_135M)
    assert len(tailed.prompts) == len(equal.prompts) == 64
    assert (tailed.num_tokens, max(tailed.lengths), equal.num_tokens) == (2606, 171, 2560)


def test_the_command_line_names_every_model():
    assert list(MODELS) == list(bench.MODELS)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("contender", [ours(), transformers_batching(), generate(2)])
def test_a_contender_runs_a_part_of_what_it_was_made_for(contender):
    model, workload = create_model(TINY.shape, "cpu"), long_tailed(TINY)
    warm_up = Workload(workload.prompts[:1], workload.lengths[:1])
    turn = take_turn(contender, model, workload, warm_up)
    assert turn.seconds > 0


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


@pytest.mark.slow
def test_the_command_needs_no_checkout(tmp_path):
    create_model(TINY.shape, "cpu").save_pretrained(tmp_path / "tiny")
    command = [sys.executable, "-m", "cb_rollout", "bench", "tiny", "--repetitions", "1", "--json"]
    done = subprocess.run(
        [*command, "--device", "cpu"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout)
    assert rates.pop("unit") == "tokens_per_second"
    assert list(rates) == ["cb_rollout", "transformers CB", "model.generate"]
    assert min(rates.values()) > 0
