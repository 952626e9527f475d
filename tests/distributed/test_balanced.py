"""Prompts dealt over processes come home as if each process had generated its own."""

import pytest
from processes import run_processes


@pytest.fixture(scope="module")
def ranks():
    return run_processes("distributed/balanced_rollouts.py")


@pytest.mark.parametrize("name", ["", "_again"])
def test_each_process_gets_the_very_tokens_it_would_have_sampled_itself(ranks, name):
    for rank in ranks:
        home, dealt = rank["home" + name], rank["dealt" + name]
        assert dealt["ids"]
        assert dealt["prompts"] == home["prompts"]
        assert dealt["tokens"] == home["tokens"]
        for ours, theirs in zip(dealt["logprobs"], home["logprobs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
        assert dealt["drift"] <= 1e-5


def test_the_idle_process_takes_work_from_the_busy_one(ranks):
    at_home = [rank["home"]["metrics"]["rollout/tokens"] for rank in ranks]
    dealt = [rank["dealt"]["metrics"]["rollout/tokens"] for rank in ranks]
    assert sum(dealt) == sum(at_home)
    assert max(dealt) < max(at_home)
    assert [rank["dealt"]["metrics"]["rollout/sequences_moved"] for rank in ranks] == [0, 4]
