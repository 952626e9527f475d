"""Several processes of a stock AsyncGRPOTrainer, whose first one samples for all."""

import pytest
from processes import run_processes
from tiny import save_checkpoint

pytestmark = pytest.mark.slow


def holds(row, ids) -> bool:
    """Whether a packed row begins with a sample's tokens."""
    return tuple(row[: len(ids)]) == tuple(ids)


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_each_process_trains_on_its_own_samples_of_one_engine(tmp_path, way):
    checkpoint = str(save_checkpoint(tmp_path))
    first, other = run_processes("distributed/trl_async.py", checkpoint, way)
    # One sample a row: each was taken once, and every process trained on its own.
    assert len(first["taken"]) >= 3 * 8
    trained = [row for process in (first, other) for row in process["rows"]]
    held = {tuple(ids) for ids in first["taken"]}
    assert all(any(holds(row, ids) for ids in held) for row in trained)
    assert not {tuple(row) for row in first["rows"]} & {tuple(row) for row in other["rows"]}
    assert first["ratios"][0] == pytest.approx(1.0, abs=1e-4)
    assert [first["has_engine"], other["has_engine"]] == [True, False]
    assert first["steps"] == other["steps"] == 3
    assert first["weights"] == other["weights"]
