import subprocess
import sys

import pytest

from cb_rollout import __version__
from cb_rollout.cli import main
from cb_rollout.records import RunRecorder, StepMetrics


def test_report_writes_the_page_and_prints_its_path(tmp_path, capsys):
    recorder = RunRecorder(tmp_path / "cb_rollout")
    recorder.record_metrics(StepMetrics(1, "train", {"reward": 0.5}, [3]))
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'cb_rollout' / 'report.html'}\n"
    assert (tmp_path / "cb_rollout" / "report.html").is_file()
    assert printed.err == ""


def test_a_fault_is_one_line_on_stderr_and_exit_code_2(tmp_path, capsys):
    assert main(["report", str(tmp_path / "not\nthere")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("cb-rollout: no records of a run in ")
    assert printed.err.count("\n") == 1


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"cb-rollout {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["unknown"], ["report"]])
def test_wrong_options_exit_with_code_2(argv, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(argv)
    assert "usage: cb-rollout" in capsys.readouterr().err


def test_the_command_line_loads_neither_torch_nor_wandb():
    code = (
        "import sys, cb_rollout.cli; "
        "print(sorted({'torch', 'transformers', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
