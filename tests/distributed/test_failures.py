"""A process that fails, dies, or fails and stays, ends the whole launch, which says why.

Each launch has a limit far below the half hour that a collective waits for a lost process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import free_port

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
TIMEOUT_SECONDS = 240


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", ["rank      : 1 (local_rank: 1)", "Signal 9 (SIGKILL)"]),
        ("linger", ["another process failed first, and this one waits for it. rank 1: ValueError"]),
    ],
)
def test_the_launch_ends_and_says_why(tmp_path, how, said):
    paths = [FOLDER.parents[1], FOLDER.parent, FOLDER.parent / "training", FOLDER]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
        *("--master_port", str(free_port()), str(FOLDER / "trl_failing.py"), how, str(tmp_path)),
    ]
    result = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode
    for words in said:
        assert words in result.stdout
    started = re.findall(r"^process (\d+) is one of (\d+)$", result.stdout, re.MULTILINE)
    assert [size for _, size in started] == ["2", "2"]
    assert len(set(started)) == 2
    assert not any(psutil.pid_exists(int(pid)) for pid, _ in started)
