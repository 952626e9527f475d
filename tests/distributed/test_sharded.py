"""Several processes train one model; each one's rollouts are those of the whole model."""

import pytest
from processes import asked_for, run_processes
from tiny import tiny_model

pytestmark = pytest.mark.slow

MODEL_BYTES = sum(tensor.nbytes for tensor in [*tiny_model().parameters(), *tiny_model().buffers()])
NUM_STEPS = 3

SHARDED = ["fsdp2", "fsdp2_root", "fsdp2_tied", "fsdp2_lora", "fsdp1", "fsdp1_tied", "fsdp1_lora"]
SLEPT = ["fsdp2_slept", "fsdp2_tied_slept", "fsdp2_lora_slept", "fsdp1_slept"]
WHOLE = ["plain", "plain_copy", "ddp", "ddp_copy"]
ZERO = ["zero1", "zero2", "zero3", "zero3_tied", "zero3_lora", "zero3_slept"]
BF16 = ["fsdp2_bf16", "fsdp2_bf16_exact", "fsdp1_bf16"]
SHARED = ["plain", "ddp", "zero1", "zero2"]
# Of these, the ways in which nothing is copied.


@pytest.fixture(scope="module")
def ranks(request):
    ways = asked_for(request, WHOLE + SHARDED + SLEPT + BF16)
    return run_processes("distributed/sharded_rollouts.py", *ways)


@pytest.fixture(scope="module")
def zero_ranks(request):
    pytest.importorskip("deepspeed", reason="ZeRO is tested where deepspeed is installed")
    return run_processes("distributed/zero_rollouts.py", *asked_for(request, ZERO))


def require_followed(ranks, way):
    is_shared = way in SHARED
    for index, rank in enumerate(ranks):
        assert rank[way]["moved"] > 1e-3
        assert rank[way]["difference"] <= 1e-5
        assert rank[way]["drift"] <= 1e-5
        assert rank[way]["parts_kept"]
        assert rank[way]["num_unequal"] == 0
        assert rank[way]["is_shared"] == is_shared
        # One process spoiled one tensor of its copy at the end, and finds that one alone.
        assert rank[way]["spoiled"] == ([] if index or is_shared else ["model.norm.weight"])


@pytest.mark.parametrize("way", WHOLE + SHARDED + SLEPT)
def test_rollouts_are_the_whole_models_after_every_step(ranks, way):
    require_followed(ranks, way)
    # A process that trains alone on the same batches ends in the same policy.
    assert max(rank[way]["apart"] for rank in ranks) <= 1e-5


@pytest.mark.parametrize("way", SLEPT)
def test_a_copy_holds_no_weights_while_processes_train(ranks, way):
    for rank in ranks:
        assert rank[way]["asleep"] == [0]
        assert rank[way]["is_same"]


def test_processes_draw_apart_by_themselves(ranks):
    assert ranks[0]["drawn"] != ranks[1]["drawn"]


@pytest.mark.parametrize("way", ZERO)
def test_under_deepspeed_too(zero_ranks, way):
    require_followed(zero_ranks, way)
    if way == "zero3_slept":
        assert all(rank[way]["asleep"] == [0] for rank in zero_ranks)


@pytest.mark.parametrize("way", ["fsdp2_bf16", "fsdp1_bf16"])
def test_under_mixed_precision_the_copy_computes_what_the_trainers_forward_does(ranks, way):
    for rank in ranks:
        assert rank[way]["forwards_equal"]
        assert rank[way]["num_unequal"] == 0
        assert rank[way]["drift"] < 0.2


@pytest.mark.ways("fsdp2_bf16", "fsdp2_bf16_exact")
def test_a_copy_holds_what_the_optimizer_steps_not_what_a_forward_left_whole(ranks):
    for rank in ranks:
        assert rank["fsdp2_bf16"]["head_is_rounded"]
        assert not rank["fsdp2_bf16_exact"]["head_is_rounded"]


@pytest.mark.parametrize("way", ["fsdp2_lora", "fsdp1_lora"])
def test_only_adapted_layers_are_copied(ranks, way):
    layer = tiny_model().model.layers[0]
    adapted = layer.self_attn.q_proj.weight.nbytes + layer.mlp.up_proj.weight.nbytes
    num_buffer_bytes = sum(buffer.nbytes for buffer in tiny_model().buffers())
    for rank in ranks:
        assert rank[way]["bytes_copied"] == [2 * adapted + num_buffer_bytes] * NUM_STEPS


def test_fsdp1_without_the_models_own_parameters_is_refused_with_advice(ranks):
    for rank in ranks:
        assert "set use_orig_params=True" in rank["refusal"]


@pytest.mark.ways("fsdp2", "fsdp1", "ddp", "ddp_copy", "fsdp2_lora_slept")
def test_what_is_copied_is_counted(ranks):
    for rank in ranks:
        # After a sleep, the frozen layers below adapters are copied too.
        for way in ("fsdp2", "fsdp1", "ddp_copy", "fsdp2_lora_slept"):
            assert rank[way]["bytes_copied"] == [MODEL_BYTES] * NUM_STEPS
        assert rank["ddp"]["bytes_copied"] == [0] * NUM_STEPS


def test_packed_log_probabilities_have_the_gradients_of_all_processes(ranks):
    for rank in ranks:
        assert max(rank["packed"]) <= 1e-5


def test_packed_log_probabilities_of_a_sharded_model_are_refused_with_advice(ranks):
    for rank in ranks:
        assert "attach a TRL trainer with loss_forward='packed'" in rank["packed_refusal"]
