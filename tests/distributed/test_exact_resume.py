"""Several processes that resume from a checkpoint train what they would have trained."""

import pytest
from processes import run_processes

pytestmark = pytest.mark.slow

NAMES = ("plain", "partial", "dynamic")


@pytest.fixture(scope="module")
def pair():
    return run_processes("distributed/trl_exact_resume.py", *NAMES)


@pytest.mark.parametrize("step", ["1", "4"])
@pytest.mark.parametrize("name", NAMES)
def test_each_process_goes_on_with_its_own_rows(pair, name, step):
    for rank in pair:
        whole, resumed = rank[name]["whole"], rank[name][step]
        expected = [row for row in whole["rows"] if row["step"] >= int(step)]
        assert len(expected) == 2 * (6 - int(step))
        for field in ("step", "tokens", "versions"):
            assert [row[field] for row in resumed["rows"]] == [row[field] for row in expected]
        assert resumed["weights"] == pytest.approx(whole["weights"], abs=1e-6)
    first, second = (rank[name]["whole"]["rows"] for rank in pair)
    assert [row["tokens"] for row in first] != [row["tokens"] for row in second]
