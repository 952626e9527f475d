"""Parcels are dealt so that the fullest process is not much fuller than the others."""

from hypothesis import given
from hypothesis import strategies as st

from cb_rollout.rollout.balancing import dealt

COSTS = st.lists(st.lists(st.integers(0, 100), max_size=8), min_size=1, max_size=5)


def loads(plan, costs):
    return [sum(costs[home][index] for home, index in share) for share in plan]


@given(COSTS)
def test_every_parcel_is_generated_once_and_no_process_gets_fuller_than_the_fullest_was(costs):
    plan = dealt(costs)
    everything = [(home, index) for home, own in enumerate(costs) for index in range(len(own))]
    assert sorted(place for share in plan for place in share) == everything
    assert max(loads(plan, costs)) <= max(map(sum, costs))


@given(COSTS)
def test_no_single_move_from_the_fullest_to_the_emptiest_would_help(costs):
    plan = dealt(costs)
    after = loads(plan, costs)
    gap = max(after) - min(after)
    fullest = plan[after.index(max(after))]
    assert all(costs[h][i] == 0 or costs[h][i] >= gap for h, i in fullest)


def test_what_is_even_stays_at_home():
    assert dealt([[3, 3], [3, 3]]) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_an_idle_process_takes_half():
    assert loads(dealt([[4, 1, 3, 2], []]), [[4, 1, 3, 2], []]) == [5, 5]
