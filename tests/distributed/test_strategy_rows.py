"""The processes of a trainer share the rows of an epoch, also over a checkpoint."""

from collections import Counter

import pytest
from counted_rows import times
from processes import asked_for, run_processes

pytestmark = pytest.mark.slow

WAYS = ("partial", "over", "dynamic")


@pytest.fixture(scope="module")
def pair(request):
    return run_processes("distributed/trl_strategy_rows.py", *asked_for(request, WAYS))


@pytest.mark.parametrize("run", ["whole", "resumed"])
@pytest.mark.parametrize("way", ["partial", "over"])
def test_each_row_is_trained_once_by_one_process(pair, way, run):
    shares = [Counter(rank[way][run][0]) for rank in pair]
    assert sum(shares, Counter()) == times(1)
    assert not shares[0].keys() & shares[1].keys()


@pytest.mark.ways("dynamic")
@pytest.mark.parametrize("run", ["whole", "resumed"])
def test_both_processes_offer_each_row_once_a_pass(pair, run):
    shares = [rank["dynamic"][run][1] for rank in pair]
    assert len(shares[0]) == len(shares[1]) > 12
    offered = [Counter(share[:12]) for share in shares]
    assert sum(offered, Counter()) == dict.fromkeys(times(1), 1)
