"""ZeRO-3 parameters are gathered a bucket at a time; deepspeed's interface, written by hand."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from cb_rollout import RolloutConfig
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.weights import create_weight_sync, require_equal, tensor


class FakeDeepspeed:
    """One process of ZeRO-3: every parameter's storage is empty outside `GatheredParameters`."""

    def __init__(self):
        self.zero = SimpleNamespace(
            GatheredParameters=self.gathered, register_external_parameter=self.register
        )
        self.registered = []
        self.most_bytes, self.num_gathers = 0, 0

    def register(self, module, parameter):
        self.registered.append((module, parameter))

    def partition(self, model):
        for index, parameter in enumerate(model.parameters()):
            parameter.ds_id, parameter.ds_shape = index, tuple(parameter.shape)
            parameter.ds_tensor = parameter.data.flatten().clone()
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    @contextmanager
    def gathered(self, params, modifier_rank=None):
        assert modifier_rank is None
        assert len({id(parameter) for parameter in params}) == len(params)
        self.num_gathers += 1
        for parameter in params:
            assert parameter.data.numel() == 0
            parameter.data = parameter.ds_tensor.clone().view(parameter.ds_shape)
        self.most_bytes = max(self.most_bytes, sum(p.data.nbytes for p in params))
        try:
            yield
        finally:
            for parameter in params:
                parameter.data = torch.empty(0, dtype=parameter.dtype)


@pytest.fixture
def deepspeed(monkeypatch):
    fake = FakeDeepspeed()
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    return fake


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7, 8]])).logits


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_follows_partitioned_parameters(deepspeed, monkeypatch, tied):
    largest = max(p.nbytes for p in tiny_model().parameters())
    monkeypatch.setattr(tensor, "BUCKET_BYTES", largest)
    model, plain = (tiny_model(tie_word_embeddings=tied) for _ in range(2))
    deepspeed.partition(model)
    weights = create_weight_sync(model, RolloutConfig())
    assert weights.is_collective
    assert torch.equal(logits(weights.module), logits(plain))
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        parameter.ds_tensor.mul_(1.25)
        other.data.mul_(1.25)
    num_bytes = sum(t.nbytes for t in [*plain.parameters(), *plain.buffers()])
    assert weights.sync() == num_bytes
    assert torch.equal(logits(weights.module), logits(plain))
    require_equal(weights)
    assert deepspeed.most_bytes <= largest
    assert deepspeed.num_gathers > 3
    assert all(parameter.numel() == 0 for parameter in model.parameters())


def test_frozen_partitioned_bases_are_not_gathered_again(deepspeed):
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), lora).eval()
    wanted = logits(model)
    deepspeed.partition(model)
    weights = create_weight_sync(hf_compat.unwrap(model), RolloutConfig())
    assert (logits(weights.module) - wanted).abs().max() <= 1e-4
    deepspeed.most_bytes = 0
    projections = [layer.self_attn.q_proj.weight for layer in weights.module.model.layers]
    num_buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    assert weights.sync() == sum(p.nbytes for p in projections) + num_buffer_bytes
    assert deepspeed.most_bytes < 2 * sum(p.nbytes for p in projections)


def test_deepspeed_is_only_imported_for_its_own_parameters(monkeypatch):
    # Another test of the process may have imported it already; None makes an import raise.
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    create_weight_sync(tiny_model(), RolloutConfig(weight_sync="copy"))


def test_a_tied_head_that_is_held_cast_is_gathered_once(deepspeed):
    model = tiny_model(tie_word_embeddings=True)
    deepspeed.partition(model)
    weights = create_weight_sync(model, RolloutConfig(rollout_dtype="bfloat16"))
    own = model.lm_head.weight.ds_tensor.mul_(1.25).view(model.lm_head.weight.ds_shape)
    weights.sync()
    assert torch.equal(weights.module.lm_head.weight, own.bfloat16())
    assert torch.equal(weights.module.model.embed_tokens.weight, own)
    require_equal(weights)
