"""Sent weights arrive in every bit, or are refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from cb_rollout import WeightSyncError
from cb_rollout.integrations.ray.weight_update import (
    DeltaCodec,
    WeightUpdate,
    bytes_of,
    counterparts,
    new_values,
    worker_tensors,
    write_weights,
)
from cb_rollout.weights.replica import tensors_by_name


def update_of(source, target, version=1):
    sent = [
        (t, bytes_of(value, t.dtype)) for t, value in new_values(source, worker_tensors(target))
    ]
    tensors, arrays = zip(*sent, strict=True)
    return WeightUpdate(version, tensors), arrays


def written(update, arrays, target):
    write_weights(update, arrays, counterparts(update, target))


def differing(one, other):
    held = tensors_by_name(other)
    return [name for name, t in tensors_by_name(one).items() if not torch.equal(t, held[name])]


@pytest.mark.parametrize("kind", ["module", "state dict"])
def test_weights_arrive_in_every_bit(kind):
    source, target = tiny_model(seed=1), tiny_model()
    assert differing(source, target)
    given = source if kind == "module" else source.state_dict()
    update, arrays = update_of(given, target)
    written(update, arrays, target)
    assert differing(source, target) == []
    assert update.num_bytes == sum(array.nbytes for array in arrays)


def test_tied_weights_travel_once_and_stay_tied():
    source = tiny_model(seed=1, tie_word_embeddings=True)
    target = tiny_model(tie_word_embeddings=True)
    update, arrays = update_of(source.state_dict(), target)
    names = [name for tensor in update.tensors for name in tensor.names[:1]]
    assert ("lm_head.weight" in names) + ("model.embed_tokens.weight" in names) == 1
    written(update, arrays, target)
    assert differing(source, target) == []
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_weights_are_cast_to_the_workers_dtype_before_they_travel():
    source, target = tiny_model(seed=1), tiny_model().bfloat16()
    update, arrays = update_of(source, target)
    written(update, arrays, target)
    assert torch.equal(target.lm_head.weight, source.lm_head.weight.bfloat16())
    whole = sum(t.nbytes for t in set(tensors_by_name(target).values()))
    assert update.num_bytes == whole


def test_adapters_are_added_out_of_place():
    base = tiny_model(seed=1)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = base.model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    target = tiny_model()
    written(*update_of(adapted, target), target)
    assert torch.equal(base.model.layers[0].self_attn.q_proj.base_layer.weight, before)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(target(ids).logits, adapted(ids).logits, atol=1e-5, rtol=1e-5)


def test_weights_of_another_model_are_refused_by_name():
    held = worker_tensors(tiny_model())
    with pytest.raises(WeightSyncError, match=r"embed_tokens.weight: \(300, 64\) given, \(256"):
        list(new_values(tiny_model(vocab_size=300), held))
    state = tiny_model().state_dict()
    state["extra.weight"] = state.pop("model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"(?s)extra.weight: not in.*norm.weight: not given"):
        list(new_values(state, held))
    update, _ = update_of(tiny_model(vocab_size=300), tiny_model(vocab_size=300))
    with pytest.raises(WeightSyncError, match="of another model"):
        counterparts(update, tiny_model())


def test_tied_names_that_differ_in_a_state_dict_are_refused():
    source = tiny_model(seed=1).state_dict()
    held = worker_tensors(tiny_model(tie_word_embeddings=True))
    with pytest.raises(WeightSyncError, match="differ in the state dict"):
        list(new_values(source, held))
    with pytest.raises(WeightSyncError, match="several in the training module"):
        list(new_values(tiny_model(seed=1), held))


def test_read_only_buffers_are_read():
    target, source = tiny_model(), tiny_model(seed=1)
    update, arrays = update_of(source, target)
    for array in arrays:
        array.setflags(write=False)
    written(update, arrays, target)
    assert differing(source, target) == []


def test_an_update_of_no_tensors_has_no_bytes():
    assert list(new_values({}, ())) == []
    assert WeightUpdate(1).num_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_deltas_change_the_bits_that_differ(dtype):
    before, after = tiny_model().to(dtype), tiny_model().to(dtype)
    target, codec = tiny_model().to(dtype), DeltaCodec()
    with torch.no_grad():
        for parameter in after.parameters():
            chosen = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)) < 0.05
            parameter.mul_(torch.where(chosen, 1.01, 1.0).to(dtype))
        # Bits, not numbers: a zero may change its sign, and a NaN its payload.
        before.model.norm.weight[0], after.model.norm.weight[0] = 0.0, -0.0
        target.model.norm.weight[0] = 0.0
    old, new = update_of(before, target), update_of(after, target)
    deltas = list(map(codec.delta, new[0].tensors, new[1], old[1]))
    write_weights(new[0], deltas, counterparts(new[0], target), are_deltas=True)
    own, wanted = tensors_by_name(target), tensors_by_name(after)
    for name, tensor in own.items():
        assert torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8)), name
    # A half of these bytes is not changed, and compresses to nothing.
    assert sum(delta.nbytes for delta in deltas) < new[0].num_bytes / 4


def test_a_damaged_delta_is_refused():
    (tensor, *_), codec = worker_tensors(tiny_model()), DeltaCodec()
    new, old = (torch.randn(tensor.shape).view(-1).view(torch.uint8).numpy() for _ in range(2))
    delta = codec.delta(tensor, new, old).copy()
    delta[len(delta) // 2] ^= 1
    with pytest.raises(Exception, match=r"checksum|corrupt"):
        codec.changed(tensor, delta)
