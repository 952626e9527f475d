import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from cb_rollout.engine.memory.plan import (
    GIB,
    STATES_DIVISOR,
    MemoryModel,
    TrainingBytes,
    create_memory_plan,
)

BYTES = st.integers(0, 2**40)
SMALL = st.integers(0, 2**20)


def plan_of(**values):
    """A plan of blocks of one token, unless `block_size` is another."""
    defaults = {
        "total_bytes": 2000,
        "free_bytes": 1000,
        "training": TrainingBytes(gradients_to_come=200),
        "max_memory_percent": 0.5,
        "block_size": 1,
        "max_batch_tokens": 0,
        "workspace_bytes_per_request": 0,
        "gathered_bytes_per_token": 0,
        "bytes_per_token": 30,
        "bytes_per_sequence": 5,
        "max_requests": 10,
    }
    return create_memory_plan(MemoryModel(**(defaults | values)))


@st.composite
def trainings(draw):
    names = [f.name for f in dataclasses.fields(TrainingBytes)]
    sizes = {name: draw(BYTES) for name in names if name not in ("is_measured", "set_reserve")}
    reserve = draw(st.none() | BYTES)
    return TrainingBytes(**sizes, is_measured=draw(st.booleans()), set_reserve=reserve)


@st.composite
def settings_of(draw):
    """A random model, device and config; small ones too, where rounding shows."""
    size = draw(st.sampled_from([BYTES, SMALL, st.integers(0, 200)]))
    free = draw(size)
    return {
        "total_bytes": free + draw(size),
        "free_bytes": free,
        "training": draw(trainings() | st.just(TrainingBytes())),
        "max_memory_percent": draw(st.floats(0.01, 1)),
        "block_size": draw(st.integers(1, 3)),
        "workspace_bytes_per_request": draw(size | st.just(0)),
        "gathered_bytes_per_token": draw(st.integers(0, 100)),
        "max_batch_tokens": draw(st.integers(0, 10)),
        "history_factor": draw(st.integers(1, 3)),
        "max_sequence_tokens": draw(st.none() | st.integers(0, 20)),
        "graph_bytes": draw(st.integers(0, 100)),
        "bytes_per_token": draw(size),
        "bytes_per_sequence": draw(size | st.just(0)),
        "max_requests": draw(st.integers(1, 50)),
    }


def test_the_budget_is_the_share_of_what_training_leaves():
    plan = plan_of()
    assert plan.budget_bytes == 400
    assert plan.num_blocks == (400 - 50) // 30
    assert plan.kv_bytes == 11 * 30
    assert not plan.is_fixed


def test_a_fixed_number_of_blocks_is_kept():
    plan = plan_of(set_blocks=1000)
    assert (plan.num_blocks, plan.is_fixed) == (1000, True)
    assert plan.left_bytes < 0
    assert "more is claimed than there is" in str(plan)


@given(settings=settings_of())
def test_the_parts_never_exceed_the_whole(settings):
    plan = plan_of(**settings)
    assert sum(part.num_bytes for part in plan.parts) == plan.total_bytes
    if plan.num_blocks or (plan.num_slots and plan.bytes_per_sequence):
        assert all(part.num_bytes >= 0 for part in plan.parts), "no part is negative"
    else:
        assert plan.kv_bytes == 0


@given(settings=settings_of())
def test_the_share_is_respected_to_one_block(settings):
    plan = plan_of(**settings)
    rest = max(0, plan.free_bytes - plan.training.reserve)
    assert plan.budget_bytes == int(plan.max_memory_percent * rest)
    assert plan.kv_bytes + plan.state_bytes <= plan.budget_bytes
    if not plan.bytes_per_block:
        return
    # One block more would not fit: the share, or the forward that reads it.
    states = min(plan.budget_bytes, max(0, rest - plan.workspace_bytes))
    states = min(states // STATES_DIVISOR, settings["max_requests"] * plan.bytes_per_sequence)
    kv = plan.kv_bytes + plan.bytes_per_block
    larger = dataclasses.replace(plan, num_blocks=plan.num_blocks + 1)
    assert kv + states > plan.budget_bytes or kv + states + larger.forward_bytes > rest


@given(settings=settings_of(), more=BYTES | st.integers(0, 200))
def test_more_memory_never_means_fewer_blocks_or_sequences(settings, more):
    larger = settings | {
        "free_bytes": settings["free_bytes"] + more,
        "total_bytes": settings["total_bytes"] + more,
    }
    assert plan_of(**larger).num_blocks >= plan_of(**settings).num_blocks
    assert plan_of(**larger).num_slots >= plan_of(**settings).num_slots


@given(
    free=st.integers(0, 300),
    more=st.integers(1, 20),
    block=st.integers(1, 20),
    states=st.integers(1, 60),
    percent=st.sampled_from([0.3, 0.5, 1.0]),
)
def test_a_hybrid_that_gains_a_sequence_loses_no_block(free, more, block, states, percent):
    sizes = {
        "training": TrainingBytes(),
        "bytes_per_token": block,
        "bytes_per_sequence": states,
        "max_memory_percent": percent,
    }
    before, after = (plan_of(free_bytes=f, **sizes) for f in (free, free + more))
    assert after.num_blocks >= before.num_blocks
    assert after.num_slots >= before.num_slots


@given(settings=settings_of(), less=BYTES | st.integers(0, 200))
def test_a_smaller_reserve_never_means_fewer_blocks(settings, less):
    reserve = TrainingBytes(set_reserve=settings["training"].reserve)
    smaller = TrainingBytes(set_reserve=max(0, reserve.reserve - less))
    before = plan_of(**(settings | {"training": reserve}))
    assert plan_of(**(settings | {"training": smaller})).num_blocks >= before.num_blocks


def test_a_reserve_beyond_what_is_free_leaves_nothing():
    assert plan_of(training=TrainingBytes(activations=5000)).num_blocks == 0


def test_a_forward_is_left_its_workspace():
    assert (
        plan_of(max_memory_percent=1, workspace_bytes_per_request=60).num_blocks == (200 - 50) // 30
    )
    plan = plan_of(max_memory_percent=1, gathered_bytes_per_token=30)
    assert plan.num_blocks == (800 - 50) // 60
    assert plan_of(workspace_bytes_per_request=30).num_blocks == plan_of().num_blocks, (
        "outside the budget is room"
    )


def test_a_forward_that_gathers_few_of_many_blocks_leaves_memory_to_the_others():
    sizes = {"max_memory_percent": 1, "bytes_per_sequence": 0, "gathered_bytes_per_token": 30}
    plan = plan_of(max_sequence_tokens=4, **sizes)
    assert plan.num_blocks == (800 - 4 * 30) // 30
    assert plan.gathered_bytes_of(plan.num_blocks) == 4 * 30


def test_a_prefill_gathers_a_block_that_rows_share_for_each_of_them():
    sizes = {"max_memory_percent": 1, "bytes_per_sequence": 0, "gathered_bytes_per_token": 30}
    plan = plan_of(max_batch_tokens=20, max_sequence_tokens=4, **sizes)
    assert plan.num_blocks == (800 - 20 * 30) // 30
    assert plan.gathered_bytes_of(plan.num_blocks) == 20 * 30
    plan = plan_of(max_batch_tokens=20, max_sequence_tokens=4, max_requests=1, **sizes)
    assert plan.gathered_bytes_of(plan.num_blocks) == 4 * 30


def test_memory_of_graphs_is_a_part_of_what_is_used():
    plan = plan_of(graph_bytes=300)
    used, graphs = plan.parts[0], next(p for p in plan.parts if p.name == "CUDA graphs")
    assert (used.num_bytes, graphs.num_bytes) == (2000 - 1000 - 300, 300)
    assert (plan.num_blocks, plan.left_bytes) == (plan_of().num_blocks, plan_of().left_bytes)


def test_a_model_without_keys_is_limited_by_its_states():
    assert plan_of(bytes_per_token=0).num_blocks > 0
    plan = plan_of(bytes_per_token=0, bytes_per_sequence=150)
    assert plan.num_slots == 400 // 150
    # The states fill the budget, and blocks take nothing of it.
    assert plan.has_room
    assert plan.left_bytes >= 0


def test_states_take_at_most_half_the_budget():
    plan = plan_of(bytes_per_sequence=60)
    assert (plan.num_slots, plan.state_bytes) == (3, 180)
    assert plan.num_blocks == (400 - 200) // 30


def test_the_reserve_is_what_is_to_come_or_what_was_set():
    to_come = {"gradients_to_come": 3, "optimizer_states_to_come": 4, "activations": 5}
    held = {"weights": 100, "gradients": 200, "optimizer_states": 300}
    assert TrainingBytes(**held, **to_come).reserve == 12
    assert TrainingBytes(**held, **to_come, set_reserve=0).reserve == 0
    assert TrainingBytes(**held, **to_come).held == 600


def test_weights_that_the_device_does_not_count_are_part_of_the_total():
    plan = plan_of(total_bytes=1000, training=TrainingBytes(weights=700))
    assert plan.total_bytes == 1700
    assert plan.parts[0].num_bytes == 0


def test_the_plan_prints_as_a_table_of_gib():
    training = TrainingBytes(
        weights=GIB, gradients=GIB // 2, gradients_to_come=GIB // 2, optimizer_states_to_come=GIB
    )
    plan = plan_of(
        total_bytes=12 * GIB,
        free_bytes=8 * GIB,
        training=training,
        workspace_bytes_per_request=GIB // 40,
        bytes_per_token=GIB // 2,
        bytes_per_sequence=GIB // 40,
    )
    lines = str(plan).splitlines()
    assert [line[:18].strip() for line in lines] == [
        "total",
        "used otherwise",
        "weights",
        "gradients",
        "optimizer states",
        "activations peak",
        "forward workspace",
        "CUDA graphs",
        "recurrent states",
        "KV cache",
        "free",
    ]
    sizes = [float(line[18:].split()[0]) for line in lines]
    assert sizes == [12, 2.5, 1, 1, 1, 0, 0.25, 0, 0.25, 3, 3]
    assert lines[3].endswith("GiB  0.500 of it to come")
    assert lines[5].endswith("not measured yet")
    assert lines[9].endswith("6 blocks at most, 50% of what training leaves")


def test_a_set_reserve_is_a_row_of_its_own():
    plan = plan_of(free_bytes=5 * GIB, total_bytes=9 * GIB, training=TrainingBytes(set_reserve=GIB))
    (line,) = (line for line in str(plan).splitlines() if line.startswith("training reserve"))
    assert line.endswith("1.000 GiB  training_reserve_gib")
    assert "activations" not in str(plan)
