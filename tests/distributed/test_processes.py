"""A test of several processes fails where they do not work together."""

import pytest
from processes import require_one_group, run_processes

WRITES = "import pathlib, sys; pathlib.Path(sys.argv[-1]).write_text('{}')\n"
TOGETHER = "from accelerate import Accelerator; Accelerator(cpu=True)\n"
# On a machine without a GPU accelerate then counts one process.
BESIDE_EACH_OTHER = "from accelerate import Accelerator; Accelerator()\n"
OF_ITS_OWN = """
import os
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def run(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(text + WRITES)
    return run_processes(str(script))


@pytest.mark.slow
def test_processes_that_make_a_group_are_counted(tmp_path):
    assert run(tmp_path, TOGETHER) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BESIDE_EACH_OTHER, "accelerate counts 1 on rank 0"),
        ("", r"rank 0 was in a group of \[\]"),
        (OF_ITS_OWN, r"rank 0 was in a group of \[\d+\]"),
    ],
)
def test_processes_that_train_beside_each_other_fail_the_test(tmp_path, text, said):
    with pytest.raises(AssertionError, match=said):
        run(tmp_path, text)


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ([(7, [7, 7]), (7, [7, 7])], "one process ran as several ranks"),
        ([(7, [7]), (8, [8])], r"rank 0 was in a group of \[7\]"),
        ([(7, [7, 8]), (8, [8])], r"rank 1 was in a group of \[8\]"),
        ([(7, [8, 7]), (8, [8, 7])], r"rank 0 was in a group of \[8, 7\]"),
    ],
)
def test_notes_that_are_not_of_one_group_are_refused(notes, said):
    written = [{"pid": pid, "members": members, "num_by_accelerate": 2} for pid, members in notes]
    with pytest.raises(AssertionError, match=said):
        require_one_group(written)
