"""The arithmetic recipe: its task, its split, and two GRPO steps through its own main."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import arithmetic_cpu as recipe
import pytest
from launching import run_recipe

import cb_rollout
from cb_rollout.engine.attention import traced_forward
from cb_rollout.metrics.run_records import METRICS_FILE
from cb_rollout.tools.cli import create_parser, demo, main


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("7*2=14-5=9+8=17", 17, True),
        ("7*2=14-5=9", 9, True),
        ("7*2=14-5=9", 17, False),
        ("7*2=14-5=9+8=18", 17, False),
        ("7*2=14-5=9+8=17+", 17, False),
        ("17", 17, False),
        ("", 17, False),
    ],
)
def test_only_the_final_number_counts(completion, answer, right):
    assert recipe.is_right(completion, answer) is right


def test_every_working_is_right_and_lengths_differ_fivefold():
    rng = random.Random(0)
    problems = [recipe.draw_problem(rng) for _ in range(500)]
    assert all(recipe.is_right(problem.worked, problem.answer) for problem in problems)
    lengths = [len(problem.worked) for problem in problems]
    assert max(lengths) >= 5 * min(lengths)
    assert max(lengths) < recipe.MAX_COMPLETION


def test_training_and_held_out_problems_do_not_overlap():
    rng = random.Random(0)
    train = recipe.draw_problems(rng, 500, held_out=False)
    held_out = recipe.draw_problems(rng, 200, held_out=True)
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in held_out}
    assert [problem.is_held_out for problem in train + held_out] == [False] * 500 + [True] * 200


def test_the_warm_start_sees_only_training_problems_and_labels_only_their_workings():
    problems = recipe.draw_problems(random.Random(0), 100, held_out=False)
    workings = [recipe.first_steps(problem.worked) for problem in problems]
    batch = recipe.create_batch(recipe.create_tokenizer(), problems, workings)
    for row, labels, problem, working in zip(
        batch["input_ids"].tolist(), batch["labels"].tolist(), problems, workings, strict=True
    ):
        assert not problem.is_held_out
        text = "".join(recipe.WORDS[token] for token in row if token != recipe.PAD)
        assert text == f"{problem.prompt}{working}<eos>"
        learned = "".join(recipe.WORDS[label] for label in labels if label >= 0)
        assert learned == f"{working}<eos>"


def test_a_working_breaks_off_after_a_whole_second_step_or_not_at_all():
    assert recipe.first_steps("7*2=14-5=9+8=17") == "7*2=14-5=9"
    assert recipe.first_steps("7*2=14-5=9") == "7*2=14-5=9"
    assert recipe.first_steps("7*2=14") == "7*2=14"


@pytest.mark.slow
def test_its_model_decodes_from_a_trace(monkeypatch):
    monkeypatch.setattr(traced_forward, "STEPS_BEFORE_TRACE", 8)
    with cb_rollout.RolloutGenerator(recipe.create_model()) as generator:
        assert "forwards: by the model, until a trace pays off" in generator.manager.decode_path
        prompt = recipe.create_tokenizer()("7*2-5+8")["input_ids"]
        params = cb_rollout.SamplingParams(ignore_eos=True)
        generator.generate_batch([prompt] * 2, sampling_params=params, max_new_tokens=24)
        assert "forwards: from a trace" in generator.manager.decode_path


@pytest.mark.slow
def test_two_steps_end_with_the_table_and_a_report(tmp_path):
    options = ("--warmup-steps", 5, "--max-steps", 2, "--num-held-out", 20)
    environment = {"PYTHONWARNINGS": "error::FutureWarning"}
    printed = run_recipe(
        "arithmetic_cpu", *options, "--output-dir", tmp_path, launcher=(), **environment
    )
    assert re.search(
        r"^largest \|log-probability difference\| \d\.\de-\d\d$", printed, re.MULTILINE
    )
    assert (tmp_path / "cb_rollout" / "report.html").exists()


@pytest.mark.slow
def test_the_largest_difference_is_zero_with_bitwise_numerics(tmp_path):
    options = ("--warmup-steps", 20, "--max-steps", 3, "--num-held-out", 40)
    printed = run_recipe(
        "arithmetic_cpu", *options, "--numerics", "bitwise", "--output-dir", tmp_path
    )
    assert re.search(r"^largest \|log-probability difference\| 0$", printed, re.MULTILINE)


def test_the_command_has_the_options_of_the_recipe_and_says_their_defaults(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipe"])
    defaults = vars(recipe.parsed_arguments())
    (commands,) = (a for a in create_parser()._actions if isinstance(a.choices, dict))
    said = {a.dest: a.help for a in commands.choices["demo"]._actions if a.dest != "help"}
    assert set(said) == set(defaults)
    for name, default in defaults.items():
        assert said[name].endswith(f" ({default})")


@pytest.mark.slow
def test_the_command_runs_the_recipe_with_what_it_was_given(tmp_path):
    options = ["--warmup-steps", "5", "--steps", "2", "--num-held-out", "20", "--seed", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "cb_rollout", "demo", *options, "--output-dir", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr.lower()
    page = Path("run", "cb_rollout", "report.html")
    assert done.stdout.splitlines()[-1].split() == ["report", str(page)]
    assert (tmp_path / page).exists()
    metrics = (tmp_path / page).with_name(METRICS_FILE).read_text().splitlines()
    assert {json.loads(line)["step"] for line in metrics} == {0, 1, 2}


def test_the_exit_code_of_the_recipe_is_the_commands(monkeypatch, tmp_path):
    endings = {"sys.exit(1)": 1, "sys.exit(0)": 0, "pass": 0, "sys.exit('why')": 2}
    before = sys.argv
    for ending, code in endings.items():
        (tmp_path / "recipe.py").write_text(f"import sys\n{ending}\n")
        monkeypatch.setattr(demo, "recipe_path", lambda: tmp_path / "recipe.py")
        assert main(["demo"]) == code
        assert sys.argv is before


def test_the_command_silences_known_messages_of_other_packages_and_no_others(
    monkeypatch, tmp_path, caplog
):
    said = ("Failed to load CPU gemm_4bit_forward from kernels-community: none", "out of memory")
    lines = [f"logging.getLogger('bitsandbytes.backends.cpu.ops').warning({m!r})" for m in said]
    (tmp_path / "recipe.py").write_text("\n".join(["import logging", *lines]))
    monkeypatch.setattr(demo, "recipe_path", lambda: tmp_path / "recipe.py")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert main(["demo"]) == 0
    assert caplog.messages == ["out of memory"]
