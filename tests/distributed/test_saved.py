"""Saved and recorded sequences of two processes have rewards of their own."""

from itertools import chain
from statistics import fmean

import pytest
from processes import asked_for, run_processes

pytestmark = pytest.mark.slow

WAYS = ("divided", "rloo", "dynamic", "eval")


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    ways = asked_for(request, WAYS)
    folder = str(tmp_path_factory.mktemp("saved"))
    return run_processes("distributed/trl_saved.py", *ways, folder)


def assert_rewards_are_of_the_rows(ranks, way):
    assert [rank["num_processes"] for rank in ranks] == [2, 2]
    for rank in ranks:
        saved = rank[way]["saved"]
        assert saved
        for mode, sum_of_ids, reward in saved:
            assert reward == sum_of_ids, mode
    first, second = ([reward for *_, reward in rank[way]["saved"]] for rank in ranks)
    assert first != second
    assert ranks[0][way]["recorded"]
    for sum_of_ids, reward in ranks[0][way]["recorded"]:
        assert reward == sum_of_ids


def test_each_process_saves_the_rewards_of_its_own_rows(tmp_path):
    ranks = run_processes("distributed/trl_saved.py", "grpo", str(tmp_path))
    assert_rewards_are_of_the_rows(ranks, "grpo")
    groups, means = ranks[0]["grpo"]["groups"], ranks[0]["grpo"]["means"]
    assert [[len(group) for group in step] for step in groups] == [[4] * 4] * 2
    assert [fmean(chain.from_iterable(step)) for step in groups] == pytest.approx(means)


@pytest.mark.parametrize("way", WAYS)
def test_rewards_are_of_the_rows_however_they_were_sampled(ranks, way):
    assert_rewards_are_of_the_rows(ranks, way)


@pytest.mark.ways("divided")
def test_a_group_that_is_divided_over_processes_is_recorded_whole(ranks):
    groups, means = ranks[0]["divided"]["groups"], ranks[0]["divided"]["means"]
    assert [[len(group) for group in step] for step in groups] == [[4], [4]]
    assert [fmean(chain.from_iterable(step)) for step in groups] == pytest.approx(means)
