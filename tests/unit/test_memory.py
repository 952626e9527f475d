from hypothesis import given
from hypothesis import strategies as st

from cb_rollout.memory import GIB, STATES_SHARE, create_memory_plan, training_reserve

BYTES = st.integers(0, 2**40)


def plan_of(**values):
    defaults = {
        "free_bytes": 1000,
        "training_reserve_bytes": 200,
        "max_memory_percent": 0.5,
        "bytes_per_block": 30,
        "bytes_per_sequence": 5,
        "max_requests": 10,
        "num_blocks": None,
    }
    return create_memory_plan(**(defaults | values))


def test_the_budget_is_the_share_of_what_training_leaves():
    plan = plan_of()
    assert plan.budget_bytes == 400
    assert plan.num_blocks == (400 - 50) // 30
    assert plan.kv_bytes == 11 * 30
    assert not plan.is_fixed


def test_a_fixed_number_of_blocks_is_kept():
    plan = plan_of(num_blocks=1000)
    assert (plan.num_blocks, plan.is_fixed) == (1000, True)


@given(free=BYTES, reserve=BYTES, percent=st.floats(0.01, 1), block=BYTES, states=BYTES)
def test_a_derived_plan_stays_within_its_budget_to_the_last_block(
    free, reserve, percent, block, states
):
    plan = plan_of(
        free_bytes=free,
        training_reserve_bytes=reserve,
        max_memory_percent=percent,
        bytes_per_block=block,
        bytes_per_sequence=states,
    )
    assert 0 <= plan.budget_bytes <= max(0, free - reserve)
    assert plan.kv_bytes + plan.state_bytes <= plan.budget_bytes
    if block:
        assert plan.kv_bytes + block + plan.state_bytes > plan.budget_bytes
    if states and plan.num_slots < 10:
        assert plan.state_bytes + states > plan.budget_bytes * (STATES_SHARE if block else 1) - 1


def test_a_reserve_beyond_what_is_free_leaves_nothing():
    assert plan_of(training_reserve_bytes=5000).num_blocks == 0


def test_a_model_without_keys_is_limited_by_nothing_but_its_states():
    assert plan_of(bytes_per_block=0).num_blocks > 0
    assert plan_of(bytes_per_block=0, bytes_per_sequence=150).num_slots == 400 // 150


def test_states_that_would_crowd_out_the_keys_serve_fewer_sequences():
    plan = plan_of(bytes_per_sequence=60)
    assert (plan.num_slots, plan.state_bytes) == (3, 180)
    assert plan.num_blocks == (400 - 180) // 30


def test_the_plan_prints_as_a_table_of_gib():
    lines = str(
        plan_of(
            free_bytes=8 * GIB,
            training_reserve_bytes=2 * GIB,
            bytes_per_block=GIB // 2,
            bytes_per_sequence=GIB // 40,
        )
    ).splitlines()
    assert [line.split()[0] for line in lines] == ["free", "training", "budget", "recurrent", "KV"]
    assert [line.split()[-2] for line in lines] == ["8.000", "2.000", "3.000", "0.250", "2.500"]
    assert "budget (50% of the rest)" in lines[2]
    assert "(5 blocks at most)" in lines[4]
    assert len({len(line) for line in lines}) == 1


def test_training_will_allocate_gradients_and_two_moments():
    assert training_reserve(trainable_bytes=100, gradient_bytes=0) == 300
    assert training_reserve(trainable_bytes=100, gradient_bytes=40) == 260
    assert training_reserve(trainable_bytes=100, gradient_bytes=100) == 200
    assert training_reserve(trainable_bytes=0, gradient_bytes=0) == 0
