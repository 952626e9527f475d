"""Several processes train one model; each one's rollouts are those of the whole model."""

import pytest
from processes import run_processes
from tiny import tiny_model

MODEL_BYTES = sum(tensor.nbytes for tensor in [*tiny_model().parameters(), *tiny_model().buffers()])


@pytest.fixture(scope="module")
def ranks():
    return run_processes("sharded_rollouts.py")


@pytest.mark.parametrize("way", ["fsdp2", "fsdp2_root", "fsdp2_tied", "fsdp2_lora", "ddp"])
def test_rollouts_are_the_whole_models_after_every_step(ranks, way):
    for rank in ranks:
        assert rank[way]["moved"] > 1e-3
        assert rank[way]["difference"] <= 1e-5
        assert rank[way]["drift"] <= 1e-5
        assert rank[way]["parts_kept"]
        assert rank[way]["is_shared"] == (way == "ddp")


def test_under_mixed_precision_the_copy_computes_what_the_trainers_forward_does(ranks):
    for rank in ranks:
        assert rank["fsdp2_bf16"]["forwards_equal"]
        assert rank["fsdp2_bf16"]["drift"] < 0.2


def test_a_copy_holds_what_the_optimizer_steps_not_what_a_forward_left_whole(ranks):
    for rank in ranks:
        assert rank["fsdp2_bf16"]["head_is_rounded"]
        assert not rank["fsdp2_bf16_exact"]["head_is_rounded"]


def test_what_is_copied_is_counted(ranks):
    layer = tiny_model().model.layers[0]
    adapted = layer.self_attn.q_proj.weight.nbytes + layer.mlp.up_proj.weight.nbytes
    num_buffer_bytes = sum(buffer.nbytes for buffer in tiny_model().buffers())
    for rank in ranks:
        assert rank["fsdp2"]["bytes_copied"] == [MODEL_BYTES] * 3
        assert rank["fsdp2_lora"]["bytes_copied"] == [2 * adapted + num_buffer_bytes] * 3
        assert rank["ddp"]["bytes_copied"] == [0] * 3
