import ast
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import save_checkpoint

import bench
from cb_rollout import __version__
from cb_rollout.metrics.run_records import METRICS_FILE, RunRecorder, StepMetrics
from cb_rollout.tools.cli import create_parser, demo, main
from cb_rollout.tools.cli.command import CommandParser
from cb_rollout.tools.dataset import DatasetOptions

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} = "}) + "\n" for n in range(4)))
    return path


def generate(checkpoint, jsonl, *more):
    return main(
        [
            *("generate", "--model", str(checkpoint), "--input", str(jsonl)),
            *("--output", str(jsonl.with_name("out.jsonl")), "--max-new-tokens", "8", *more),
        ]
    )


def the_fault(capsys):
    """Return the line that a command wrote to stderr, and check that it printed nothing."""
    printed = capsys.readouterr()
    assert printed.out == ""
    fault = printed.err.splitlines()[-1]
    assert fault.startswith("cb-rollout: ")
    return fault


def test_report_writes_the_page_and_prints_its_path(tmp_path, capsys):
    recorder = RunRecorder(tmp_path / "cb_rollout")
    recorder.record_metrics(StepMetrics(1, "train", {"reward": 0.5}, [3]))
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'cb_rollout' / 'report.html'}\n"
    assert (tmp_path / "cb_rollout" / "report.html").is_file()
    assert printed.err == ""


def test_report_lists_the_runs_of_a_directory_and_takes_one_by_its_id(tmp_path, capsys):
    first, second = RunRecorder(tmp_path), RunRecorder(tmp_path)
    first.record_metrics(StepMetrics(9, "train", {"reward": 0.5}, [3]))
    second.begin_run(from_step=9)
    second.record_metrics(StepMetrics(12, "train", {"reward": 0.5}, [3]))
    assert main(["report", str(tmp_path), "--list"]) == 0
    assert capsys.readouterr().out == (
        f"{first.run_id}  steps 9 to 9\n"
        f"{second.run_id}  steps 9 to 12, after {first.run_id} (up to step 9)\n"
    )
    assert main(["report", str(tmp_path), "--run", first.run_id]) == 0
    assert "from 9 to 9" in (tmp_path / "report.html").read_text()
    twice = ["--run", first.run_id, "--run", second.run_id]
    assert main(["report", str(tmp_path), str(tmp_path), *twice]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--run", "x"]) == 2
    assert f"no run is called 'x'; there is {first.run_id}, {second.run_id}." in the_fault(capsys)
    assert main(["report", str(tmp_path), *twice]) == 2
    assert "--run is given 2 times for 1 RUN_DIR" in the_fault(capsys)


def test_report_and_its_list_are_json_too(tmp_path, capsys):
    recorder = RunRecorder(tmp_path)
    recorder.record_metrics(StepMetrics(3, "train", {"reward": 0.5}, [3]))
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "report.html")}
    assert main(["report", str(tmp_path), "--list", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["run_id"], run["steps"]) == (recorder.run_id, [3])


def test_a_fault_is_one_line_on_stderr_and_exit_code_2(tmp_path, capsys):
    assert main(["report", str(tmp_path / "not\nthere")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("cb-rollout: no records of a run in ")
    assert printed.err.count("\n") == 1


def test_report_on_a_folder_without_records_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("hello")
    (tmp_path / "directories" / METRICS_FILE).mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "empty" / METRICS_FILE)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("missing", "file", "directories", "empty", "loop"):
        assert main(["report", str(tmp_path / name)]) == 2
        assert f"no records of a run in {tmp_path / name}" in the_fault(capsys)
    assert main(["report", str(tmp_path / ("x" * 300))]) == 2
    assert "File name too long" in the_fault(capsys)


def test_report_where_the_page_cannot_be_written_is_one_line(tmp_path, capsys):
    RunRecorder(tmp_path).record_metrics(StepMetrics(1, "train", {"reward": 0.5}, [3]))
    (tmp_path / "report.html").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    assert "report.html cannot be read or written (Is a directory)" in the_fault(capsys)


@pytest.mark.parametrize(
    "record",
    [
        b"\xff\xfe",
        b"{}",
        b"3",
        b'{"step": "first", "mode": "train", "scalars": {}, "completion_lengths": []}',
        b'{"step": 1, "mode": "test", "scalars": {}, "completion_lengths": []}',
        b'{"step": 1, "mode": "train", "scalars": {"reward": "high"}, "completion_lengths": []}',
        b'{"step": 1, "mode": "train", "scalars": {}, "completion_lengths": ["long"]}',
    ],
)
def test_report_names_the_line_that_is_no_record(tmp_path, capsys, record):
    (tmp_path / METRICS_FILE).write_bytes(record + b"\n")
    assert main(["report", str(tmp_path)]) == 2
    assert f"line 1 of {tmp_path / METRICS_FILE} is not a record" in the_fault(capsys)


def test_generate_writes_the_output_and_prints_a_summary(
    checkpoint, jsonl, capsys, tmp_path, monkeypatch
):
    (tmp_path / "lengths.py").write_text("def length(row):\n    return len(row['token_ids'])\n")
    monkeypatch.chdir(tmp_path)
    options = ["--temperature", "1", "--num-return-sequences", "2", "--evaluate", "lengths:length"]
    assert generate(checkpoint, jsonl, *options) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"8 sequences of 4 rows in {tmp_path / 'out.jsonl'}\n")
    assert "score  rows  sequences" in printed.out
    assert "8/8" in printed.err
    assert "tokens/s" in printed.err
    assert generate(checkpoint, jsonl, *options) == 0
    assert "8 of them from before" in capsys.readouterr().out


def test_the_summary_of_generate_is_json_too(checkpoint, jsonl, capsys, tmp_path, monkeypatch):
    (tmp_path / "ones.py").write_text("def one(row):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    jsonl.write_text(jsonl.read_text().splitlines()[0] + "\n")
    assert generate(checkpoint, jsonl, "--json", "--evaluate", "ones:one") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_rows"], report["num_failed"]) == (1, 0)
    # A mean over one row has no standard error, and JSON has no NaN.
    assert [(score["mean"], score["mean_error"]) for score in report["scores"]] == [(1.0, None)]


def test_generate_with_failed_sequences_exits_with_code_1(checkpoint, jsonl, capsys):
    with jsonl.open("a") as file:
        file.write(json.dumps({"prompt": "x" * 600}) + "\n")
    assert generate(checkpoint, jsonl) == 1
    assert "1 of them failed" in capsys.readouterr().out


def test_an_interrupted_command_exits_with_code_130_and_says_how_to_go_on(
    checkpoint, jsonl, capsys, tmp_path, monkeypatch
):
    (tmp_path / "impatient.py").write_text(
        "import signal\ndef score(row):\n    signal.raise_signal(signal.SIGINT)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert generate(checkpoint, jsonl, "--evaluate", "impatient:score", "--no-progress-bar") == 130
    fault = the_fault(capsys)
    assert "interrupted: 0 of 4 sequences" in fault
    assert "run the same again" in fault


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--input", "missing.jsonl"], "missing.jsonl does not exist"),
        (["--model", "./missing"], "'./missing' does not exist"),
        (["--output", "in.jsonl"], "in.jsonl is the input"),
        (["--output", "/"], "/ cannot be written: it is a directory; name a file"),
        (["--output", "no/x.jsonl"], "no/x.jsonl cannot be written: no is not a directory; make"),
        (["--output", "in.jsonl/x"], "in.jsonl/x cannot be written: in.jsonl is not a directory"),
        (["--temperature", "-1"], "--temperature -1.0 "),
        (["--num-return-sequences", "0"], "--num-return-sequences 0 is below 1"),
        (["--num-return-sequences", "2"], "--num-return-sequences 2 sequences of a row equal"),
        (["--max-memory-percent", "40"], "--max-memory-percent 40.0 is outside (0, 1]"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0 "),
        (["--seed", "-1"], "--seed -1 "),
        (["--dtype", "int3"], "--dtype int3 "),
        (["--evaluate", "json"], "--evaluate json is not of the form module:function"),
        (["--generation-config", "mine"], "--generation-config mine "),
    ],
)
def test_an_error_of_generate_is_one_line(checkpoint, jsonl, capsys, monkeypatch, options, said):
    monkeypatch.chdir(jsonl.parent)
    before = jsonl.read_bytes()
    assert generate(checkpoint, jsonl, *options) == 2
    assert said in the_fault(capsys)
    assert jsonl.read_bytes() == before


def test_generate_has_every_option_of_the_data_set_function(checkpoint, jsonl):
    required = ["generate", "--model", "m", "--input", "i", "--output", "o"]
    plain = vars(create_parser().parse_args(required))
    assert set(plain) == {"model", "dataset", "output", "run", "is_json"}
    for field in dataclasses.fields(DatasetOptions):
        flag = f"--{field.name.replace('_', '-')}"
        given = [flag] if field.default is False else [flag, "1"]
        parsed = vars(create_parser().parse_args([*required, *given]))
        assert set(parsed) - set(plain) == {field.name}


def test_env_names_versions_and_the_machine_as_text_and_as_json(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CB_ROLLOUT_API_KEY", "secret")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert found["cb_rollout"] == __version__
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["variables"]["OMP_NUM_THREADS"] == "1"
    for name, value in (found["packages"] | found["variables"]).items():
        assert re.search(rf"^{name} +{re.escape(str(value or 'none'))}$", text, re.MULTILINE)
    assert "secret" not in text + printed
    assert str(Path.home()) not in text + printed


def test_env_lists_the_gpus_that_the_driver_names(capsys, monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA X, 81559 MiB, 580.1'\necho 'NVIDIA Y, 24576 MiB, 580.1'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("gpus")] == [
        "NVIDIA X, 81559 MiB, 580.1",
        "NVIDIA Y, 24576 MiB, 580.1",
    ]


def third_party_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        yield from {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def test_a_workload_is_in_a_module_whose_packages_it_names():
    root = ROOT / "scripts"
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts): set(third_party_imports(path))
        for path in (root / "benchmarks").rglob("*.py")
    }
    assert {work.module for work in bench.WORKLOADS.values()} <= set(modules)
    # Torch needs numpy and sympy; only functions of workloads that name the last two import them.
    own = {
        *("cb_rollout", "benchmarks", "smollm2", "numpy", "sympy", *bench.PACKAGES),
        *("triton", "opentelemetry"),
    }
    for name, imported in modules.items():
        works = [work for work in bench.WORKLOADS.values() if work.module == name]
        asked_for = [set(work.packages) for work in works]
        assert all(imported - own <= packages for packages in asked_for or [set()]), name


def test_the_demo_names_every_package_that_its_recipe_imports():
    imported = set(third_party_imports(demo.recipe_path()))
    assert imported - {"cb_rollout"} <= set(demo.PACKAGES)


@pytest.mark.parametrize(
    ("package", "command", "requirement"),
    [
        ("trl", ["demo"], "cb_rollout"),
        ("tokenizers", ["demo"], "cb_rollout"),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(
    package, command, requirement, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    # What Python itself takes for a module that is not there.
    monkeypatch.setitem(sys.modules, package, None)
    assert main(command) == 2
    fault = the_fault(capsys)
    assert f"needs {package}, not installed here" in fault
    assert fault.endswith(f"pip install {requirement}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--repetitions", "0"], "--repetitions 0 is below 1"),
        (["--batch-size", "-1"], "--batch-size -1 is below 1"),
        (["--device", "tpu"], "--device tpu"),
        (["no/such/checkpoint"], "no/such/checkpoint"),
    ],
)
def test_an_error_of_bench_is_one_line(capsys, options, said):
    assert main(["bench", *options]) == 2
    assert said in the_fault(capsys)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--repetitions", "0"], "--repetitions 0 is below 1"),
        (["--tiny"], "--output-dir"),
        (["--output-dir", "taken"], "taken cannot be made (File exists)"),
        (["--output-dir", "/proc/self"], "/proc/self cannot be"),
    ],
)
def test_an_error_of_the_checkouts_bench_is_one_line(capsys, monkeypatch, tmp_path, options, said):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.chdir(tmp_path)
    assert bench.main(options) == 2
    assert said in the_fault(capsys)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seed", "-1"], "--seed -1 is below 0"),
        (["--seed", str(2**32)], f"--seed {2**32} is above {2**32 - 1}"),
        (["--max-steps", "0"], "--max-steps 0 is below 1"),
        (["--warmup-steps", "-1"], "--warmup-steps -1 is below 0"),
        (["--num-held-out", "0"], "--num-held-out 0 is below 1"),
        (["--output-dir", "taken"], "taken cannot be made (File exists)"),
        (["--output-dir", "/proc/self"], "/proc/self cannot be"),
    ],
)
def test_an_error_of_the_demo_is_one_line(capsys, monkeypatch, tmp_path, options, said):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *options]) == 2
    assert said in the_fault(capsys)


def test_a_message_names_a_setting_by_its_option_and_leaves_other_words():
    parser = CommandParser("x")
    for option in ("--max-num-seqs", "--seed", "--name"):
        parser.add_argument(option)
    parser.add_argument("--over-write", action="store_true")
    parser.add_argument("--no-status", dest="status", action="store_false")
    for text, said in (
        ("max_requests_per_batch=0 is below 1", "--max-num-seqs 0 is below 1"),
        ("set name='a', or name='a b'.", "set --name a, or --name 'a b'."),
        ("set over_write=True or raise max_num_seqs", "set --over-write or raise --max-num-seqs"),
        ("a seed of /x/max_num_seqs/y", "a seed of /x/max_num_seqs/y"),
        ("status=False, num_blocks=3", "status=False, num_blocks=3"),
    ):
        assert parser.in_options(text) == said


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"cb-rollout {__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["unknown"], ["report"], ["generate", "--model", "x"], ["bench", "x", "y"]]
)
def test_wrong_options_exit_with_code_2(argv, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(argv)
    assert "usage: cb-rollout" in capsys.readouterr().err


NOT_WHOLE = [" 5", "+5", "\u0665", "1_000", "05", "5.0", "five", "", "9" * 5000]
NOT_REAL = [" 0.5", "+0.5", "\u0665", "1_0.5", "nan", "inf", "Infinity", "half", "", "."]


@pytest.mark.parametrize("text", NOT_WHOLE)
def test_a_whole_number_is_written_in_plain_digits(text, capsys):
    for argv in (
        ["serve", "m", "--port"],
        ["generate", "--model", "m", "--input", "i", "--output", "o", "--max-new-tokens"],
        ["bench", "--repetitions"],
        ["doctor", "m", "--lora"],
        ["demo", "--seed"],
        ["watch", "r", "--port"],
        ["audit", "r", "--model", "m", "--top-k"],
        ["serve", "m", "--seed"],
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            main([*argv[:-1], f"{argv[-1]}={text}"])
        assert "is not a whole number in plain digits" in capsys.readouterr().err


@pytest.mark.parametrize("text", NOT_REAL)
def test_a_number_is_written_in_plain_digits(text, capsys):
    for argv in (
        ["generate", "--model", "m", "--input", "i", "--output", "o", "--temperature"],
        ["doctor", "m", "--gpu-gib"],
        ["audit", "r", "--model", "m", "--top-p"],
        ["serve", "m", "--drain-seconds"],
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            main([*argv[:-1], f"{argv[-1]}={text}"])
        assert "is not a number in plain digits" in capsys.readouterr().err


def test_numbers_in_plain_digits_are_taken():
    parse = create_parser().parse_args
    for text, number in (("0", 0), ("-1", -1), ("1000", 1000)):
        assert parse(["serve", "m", f"--seed={text}"]).seed == number
    for text, number in ((".5", 0.5), ("5.", 5), ("-1", -1), ("1e-3", 0.001), ("2E+1", 20)):
        assert parse(["serve", "m", f"--drain-seconds={text}"]).drain_seconds == number


def test_help_loads_neither_torch_nor_wandb():
    code = (
        "import sys, contextlib, cb_rollout.tools.cli\n"
        "(commands,) = (a for a in cb_rollout.tools.cli.create_parser()._actions if a.choices)\n"
        "for command in ('', *commands.choices):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        cb_rollout.tools.cli.main([*filter(None, [command]), '--help'])\n"
        "heavy = {'torch', 'transformers', 'wandb', 'datasets', 'numpy', 'pyarrow', 'tqdm'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
