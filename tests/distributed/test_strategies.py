"""Strategies in the batches of several processes: each has whole groups of its own."""

import pytest
from processes import asked_for, run_processes

pytestmark = pytest.mark.slow

WAYS = ("dynamic", "dynamic_split", "over", "partial", "fsdp2")


@pytest.fixture(scope="module")
def pair(request):
    return run_processes("distributed/trl_strategies.py", *asked_for(request, WAYS))


@pytest.mark.parametrize("way", WAYS)
def test_each_process_has_its_own_groups_and_the_loss_counts_all(pair, way):
    runs = [rank[way] for rank in pair]
    assert [len(run["batches"]) for run in runs] == [3, 3]
    for here, there in zip(*(run["batches"] for run in runs), strict=True):
        assert len(here["rows"]) == len(there["rows"]) == 12
        assert here["rows"] != there["rows"]
        assert (here["records"], there["records"]) == (here["rows"], there["rows"])
        assert here["num_items"] == there["num_items"] == here["num_tokens"] + there["num_tokens"]
        if way in ("dynamic", "dynamic_split", "over"):
            # Partial rollouts end what an older policy began; elsewhere the trainer's forward is
            # the reference of every token.
            assert max(here["difference"], there["difference"]) <= 1e-5
    assert runs[0]["weight_sum"] == runs[1]["weight_sum"]
    assert max(drift for run in runs for drift in run["drifts"]) <= 1e-5


@pytest.mark.parametrize("way", ["dynamic", "dynamic_split", "fsdp2"])
def test_every_group_has_an_advantage_and_every_process_drops_as_many(pair, way):
    runs = [rank[way] for rank in pair]
    assert runs[0]["dropped"] == runs[1]["dropped"]
    assert sum(runs[0]["dropped"]) > 0
    for batch in (batch for run in runs for batch in run["batches"]):
        for start in range(0, 12, 4):
            assert any(batch["advantages"][start : start + 4])


def test_groups_to_spare_go_to_the_process_that_lacks_some(pair):
    own = [[0, 0], [0, 1], [0, 2]], [[1, 0], [1, 1], [1, 2]]
    # Five and five: nobody lacks any. One and two: nobody has any to spare.
    assert [rank["dealt"][0] for rank in pair] == [[own[0], 0], [own[1], 0]]
    assert [rank["dealt"][1] for rank in pair] == [[own[0][:1], 3], [own[1][:2], 3]]
    assert [rank["dealt"][2] for rank in pair] == [[own[0], 0], [[[1, 0], [0, 3], [0, 4]], 0]]


@pytest.mark.ways("dynamic", "dynamic_split")
def test_only_sampling_ahead_is_refused_over_a_split_copy(pair):
    for rank in pair:
        assert "tensor_parallel_size above 1" in rank["dynamic_split"]["refusal"]
        assert rank["dynamic"]["refusal"] == ""


def test_a_group_divided_over_processes_is_refused(pair):
    for rank in pair:
        assert "a process's 2 rows of a generation" in rank["refusal"]
        assert "no multiple of num_generations=4" in rank["refusal"]
