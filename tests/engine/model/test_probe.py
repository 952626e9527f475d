import pytest
import torch
from tiny import FAMILIES, SMALL, tiny_model
from transformers import AutoModelForCausalLM, DeepseekV32Config, MambaConfig
from transformers.cache_utils import DynamicLayer

from cb_rollout.compat.transformers import cache_argument
from cb_rollout.engine.kv_cache.layout import CacheLayout, LayerSpec, TensorSpec
from cb_rollout.engine.model.probe import probe
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.errors import ConfigurationError

SPARSE = {
    **{name: value for name, value in SMALL.items() if name != "head_dim"},
    **{name: value for name, value in FAMILIES["deepseek_v3"].items() if value is not None},
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "index_n_heads": 4,
    "index_head_dim": 12,
    "index_topk": 8,
}


def layers_of(family, autocast_dtype=None):
    return ModelRunner(tiny_model(family), autocast_dtype).probe().layers


def f32(*shape):
    return TensorSpec(shape, torch.float32)


def bf16(*shape):
    return TensorSpec(shape, torch.bfloat16)


def test_llama_stores_equal_keys_and_values_in_every_layer():
    assert layers_of("llama") == (LayerSpec(f32(2, 16), f32(2, 16)),) * 2


def test_deepseek_stores_one_latent_and_a_smaller_rotary_part():
    assert layers_of("deepseek_v3") == (LayerSpec(f32(1, 16), f32(1, 8)),) * 2


@pytest.mark.parametrize(
    ("family", "conv", "recurrent", "attention"),
    [
        ("lfm2", f32(64, 3), None, (2, 16)),
        ("qwen3_5_text", f32(128, 4), f32(4, 16, 16), (2, 16)),
        ("granitemoehybrid", f32(160, 4), f32(8, 16, 16), (4, 16)),
    ],
)
def test_a_hybrid_stores_states_in_one_layer_and_keys_in_the_other(
    family, conv, recurrent, attention
):
    assert layers_of(family) == (
        LayerSpec(conv=(conv,), recurrent=(recurrent,)),
        LayerSpec(f32(*attention), f32(*attention)),
    )


def test_sparse_attention_stores_an_index_of_every_token():
    config = DeepseekV32Config(**SPARSE)
    (layer,) = ModelRunner(AutoModelForCausalLM.from_config(config).eval(), None).probe().layers
    assert layer.index == f32(1, 12)
    # transformers 5.17 keeps keys and values of each head, later releases their latents.
    assert layer in (
        LayerSpec(f32(1, 16), f32(1, 8), index=f32(1, 12)),
        LayerSpec(f32(4, 16), f32(4, 16), index=f32(1, 12)),
    )


def test_a_model_whose_layers_are_all_recurrent_is_probed():
    config = MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=64, state_size=8)
    layers = ModelRunner(AutoModelForCausalLM.from_config(config).eval(), None).probe().layers
    assert layers == (LayerSpec(conv=(f32(128, 4),), recurrent=(f32(128, 8),)),) * 2


def test_under_autocast_keys_and_values_are_stored_as_attention_casts_them():
    """Only those that go straight to attention: DeepSeek's latents are unfolded first."""
    assert layers_of("qwen3", torch.bfloat16) == (LayerSpec(bf16(2, 16), bf16(2, 16)),) * 2
    latents = layers_of("deepseek_v3", torch.bfloat16)[0]
    assert latents == LayerSpec(f32(1, 16), f32(1, 8))
    assert layers_of("qwen3") == (LayerSpec(f32(2, 16), f32(2, 16)),) * 2


def test_bytes_follow_from_shapes_and_dtypes():
    layout = CacheLayout(
        (
            LayerSpec(f32(2, 16), bf16(2, 8)),
            LayerSpec(conv=(f32(6, 4), None), recurrent=(None, bf16(3, 3))),
            LayerSpec(),
        )
    )
    assert layout.bytes_per_token == 2 * 16 * 4 + 2 * 8 * 2
    assert layout.bytes_per_sequence == 6 * 4 * 4 + 3 * 3 * 2
    assert [layer.is_recurrent for layer in layout.layers] == [False, True, False]
    assert layout.is_recurrent


def test_attention_alone_is_not_recurrent():
    assert not CacheLayout((LayerSpec(f32(1, 1), f32(1, 1)),)).is_recurrent


def test_probing_leaves_the_model_and_the_random_state_as_they_were():
    model = tiny_model("qwen3").train()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    ModelRunner(model, None).probe()
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


class CompressingLayer(DynamicLayer):
    """Stores something else than its parent."""


def test_an_unknown_layer_type_is_refused_with_what_to_use():
    model = tiny_model("qwen3")

    def forward(input_ids, cache):
        cache.layers[1] = CompressingLayer()
        return model(input_ids, **{cache_argument(model): cache}, use_cache=True)

    with pytest.raises(ConfigurationError, match=r"a CompressingLayer layer .*model\.generate"):
        probe(model.config, forward)
