"""Packed weights arrive whole, in every bit, or are refused."""

import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from cb_rollout import WeightSyncError
from cb_rollout.integrations.ray.weight_update import (
    WeightUpdate,
    packed,
    require_counterparts,
    require_whole,
    worker_tensors,
    write_weights,
)
from cb_rollout.weights.replica import tensors_by_name


def update_of(source, target, version=1, **options):
    found = list(packed(source, worker_tensors(target), **options))
    return WeightUpdate(version, [sent for sent, _ in found]), [buffer for _, buffer in found]


def written(update, buffers, target):
    require_whole(update, buffers)
    require_counterparts(update, tensors_by_name(target))
    write_weights(update, buffers, tensors_by_name(target))


def differing(one, other):
    held = tensors_by_name(other)
    return [name for name, t in tensors_by_name(one).items() if not torch.equal(t, held[name])]


@pytest.mark.parametrize("max_buffer_bytes", [1, 30_000, 2**30])
@pytest.mark.parametrize("kind", ["module", "state dict"])
def test_weights_arrive_in_every_bit(kind, max_buffer_bytes):
    source, target = tiny_model(seed=1), tiny_model()
    assert differing(source, target)
    given = source if kind == "module" else source.state_dict()
    update, buffers = update_of(given, target, max_buffer_bytes=max_buffer_bytes)
    written(update, buffers, target)
    assert differing(source, target) == []
    assert update.num_bytes == sum(array.nbytes for buffer in buffers for array in buffer)
    expected = {1: len(update.tensors), 30_000: len(buffers), 2**30: 1}
    assert len(buffers) == expected[max_buffer_bytes]


def test_tied_weights_travel_once_and_stay_tied():
    source = tiny_model(seed=1, tie_word_embeddings=True)
    target = tiny_model(tie_word_embeddings=True)
    update, buffers = update_of(source.state_dict(), target)
    names = [name for tensor in update.tensors for name in tensor.names[:1]]
    assert ("lm_head.weight" in names) + ("model.embed_tokens.weight" in names) == 1
    written(update, buffers, target)
    assert differing(source, target) == []
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_weights_are_cast_to_the_workers_dtype_before_they_travel():
    source, target = tiny_model(seed=1), tiny_model().bfloat16()
    update, buffers = update_of(source, target)
    written(update, buffers, target)
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


def test_a_cut_off_update_is_refused():
    target = tiny_model()
    update, buffers = update_of(tiny_model(seed=1), target, max_buffer_bytes=30_000)
    with pytest.raises(WeightSyncError, match=rf"cut off: {len(buffers) - 1} of {len(buffers)}"):
        require_whole(update, buffers[:-1])
    cut = [*buffers[:-1], buffers[-1][:-1]]
    with pytest.raises(WeightSyncError, match=r"cut off: buffer .* bytes"):
        require_whole(update, cut)
    cut[-1] = [*buffers[-1][:-1], buffers[-1][-1][:-64]]
    with pytest.raises(WeightSyncError, match=r"cut off: buffer .* bytes"):
        require_whole(update, cut)


def test_a_wrong_checksum_is_refused():
    target = tiny_model()
    update, buffers = update_of(tiny_model(seed=1), target)
    buffers[0][0][1000] ^= 1
    with pytest.raises(WeightSyncError, match=r"embed_tokens.weight in buffer 0 has the checksum"):
        require_whole(update, buffers)


def test_weights_of_another_model_are_refused_by_name():
    held = worker_tensors(tiny_model())
    with pytest.raises(WeightSyncError, match=r"embed_tokens.weight: \(300, 64\) given, \(256"):
        list(packed(tiny_model(vocab_size=300), held))
    state = tiny_model().state_dict()
    state["extra.weight"] = state.pop("model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"(?s)extra.weight: not in.*norm.weight: not given"):
        list(packed(state, held))
    update, _ = update_of(tiny_model(vocab_size=300), tiny_model(vocab_size=300))
    with pytest.raises(WeightSyncError, match="of another model"):
        require_counterparts(update, tensors_by_name(tiny_model()))


def test_tied_names_that_differ_in_a_state_dict_are_refused():
    source = tiny_model(seed=1).state_dict()
    held = worker_tensors(tiny_model(tie_word_embeddings=True))
    with pytest.raises(WeightSyncError, match="differ in the state dict"):
        list(packed(source, held))
    with pytest.raises(WeightSyncError, match="several in the training module"):
        list(packed(tiny_model(seed=1), held))


def test_read_only_buffers_are_read():
    target, source = tiny_model(), tiny_model(seed=1)
    update, buffers = update_of(source, target)
    for buffer in buffers:
        for array in buffer:
            array.setflags(write=False)
    written(update, buffers, target)
    assert differing(source, target) == []


def test_an_update_of_no_tensors_has_no_buffers():
    assert list(packed({}, ())) == []
    assert WeightUpdate(1, ()).num_bytes == 0


@pytest.mark.slow
def test_a_trainer_without_a_pool_needs_no_xxhash():
    script = (
        "import sys; sys.modules['xxhash'] = None; import cb_rollout.integrations.ray.weight_update"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
