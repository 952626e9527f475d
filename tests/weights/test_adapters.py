"""LoRA: merged into the copy out of place, unmerged on the shared module."""

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from pretend_device import DEVICE, GIB, Pretended, pretend_device
from tiny import plain_logprobs, tiny_model

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.weights import create_weight_sync, require_equal
from cb_rollout.weights.base import SharedWeights
from cb_rollout.weights.copied import CopiedWeights
from cb_rollout.weights.replica import tensors_by_name

COPY = RolloutConfig(weight_sync="copy", seed=0)
TARGETS = ["q_proj", "down_proj"]


def lora(dtype=torch.float32, family="qwen3", **settings):
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS} | settings
    return get_peft_model(tiny_model(family).to(dtype), LoraConfig(**settings))


def train(model, seed: int = 0, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * scale
                parameter.add_(noise.to(parameter.dtype))


def copy_of(model):
    return create_weight_sync(hf_compat.unwrap(model), COPY)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
        ("qwen3", {"modules_to_save": ["lm_head", "norm"]}),
        ("qwen3", {"use_rslora": True}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ],
)
def test_a_merged_copy_computes_what_the_unmerged_model_computes(family, settings):
    model = lora(family=family, **settings).eval()
    train(model)
    weights = copy_of(model)
    assert (logits(weights.module) - logits(model)).abs().max() <= 1e-4
    assert (logits(weights.module) - logits(model.get_base_model())).abs().max() <= 1e-4
    with model.disable_adapter():
        assert (logits(weights.module) - logits(model)).abs().max() > 0.01
        weights.sync()
        assert torch.equal(logits(weights.module), logits(model))
    weights.sync()
    assert (logits(weights.module) - logits(model)).abs().max() <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_a_thousand_syncs_drift_by_nothing(dtype):
    model = lora(dtype)
    base = {name: t.clone() for name, t in model.named_parameters() if not t.requires_grad}
    weights = copy_of(model)
    places = {name: t.data_ptr() for name, t in tensors_by_name(weights.module).items()}
    for seed in range(1000):
        train(model, seed, scale=0.02)
        weights.sync()
    fresh = tensors_by_name(copy_of(model).module)
    kept = tensors_by_name(weights.module)
    assert all(torch.equal(kept[name], tensor) for name, tensor in fresh.items())
    assert {name: t.data_ptr() for name, t in kept.items()} == places
    trained = dict(model.named_parameters())
    assert all(torch.equal(trained[name], tensor) for name, tensor in base.items())
    require_equal(weights)


def test_the_merge_is_rounded_once():
    model = lora(torch.bfloat16)
    train(model)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    A, B = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = layer.base_layer.weight.double() + 2.0 * B @ A
    merged = copy_of(model).module.model.layers[0].self_attn.q_proj.weight
    assert merged.dtype == torch.bfloat16
    # Float32 sums may fall on the other side of a tie now and then.
    assert (merged == exact.to(torch.bfloat16)).float().mean() > 0.999


def test_only_what_adapters_change_is_copied():
    model = lora()
    weights = copy_of(model)
    layers = weights.module.model.layers
    adapted = sum(x.self_attn.q_proj.weight.nbytes + x.mlp.down_proj.weight.nbytes for x in layers)
    num_buffer_bytes = sum(buffer.nbytes for buffer in weights.module.buffers())
    train(model)
    assert weights.sync() == adapted + num_buffer_bytes
    # An inference copy: no adapter trains, and nothing was written.
    model.requires_grad_(False)
    weights.sync()
    assert weights.sync() == num_buffer_bytes
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.set_scale("default", 3.0)
    assert weights.sync() == layer.base_layer.weight.nbytes + num_buffer_bytes


def test_another_active_adapter_is_followed():
    model = lora().eval()
    train(model)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"]))
    weights = copy_of(model)
    model.set_adapter("second")
    train(model, seed=5)
    weights.sync()
    assert (logits(weights.module) - logits(model)).abs().max() <= 1e-4


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"trainable_token_indices": [5]}])
def test_a_variant_that_is_no_plain_sum_is_refused_by_name(settings):
    with pytest.raises(ConfigurationError, match=r"merges plain LoRA only, not .*'shared'"):
        copy_of(lora(**settings))


def test_another_kind_of_adapter_is_refused_by_name():
    model = get_peft_model(
        tiny_model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    with pytest.raises(ConfigurationError, match=r"not peft\.tuners\.ia3\.layer\.Linear"):
        copy_of(model)


def test_auto_runs_the_trainers_adapters_unmerged_under_autocast_too():
    model = hf_compat.unwrap(lora())
    weights = create_weight_sync(model, RolloutConfig(rollout_dtype="bfloat16"))
    own, found = dict(model.named_parameters()), dict(weights.module.named_parameters())
    adapters = [name for name in own if "lora_" in name]
    assert adapters
    assert all(found[name] is own[name] for name in adapters)


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
def test_rollouts_follow_the_adapters(weight_sync):
    model = lora().eval()
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    config = RolloutConfig(weight_sync=weight_sync, seed=0, verify_weight_sync=True)
    with RolloutGenerator(model, config) as generator:
        for seed in range(2):
            train(model, seed)
            report = generator.sync_weights()
            assert (report.bytes_copied > 0) == (weight_sync == "copy")
            (output,) = generator.generate_batch([[5, 6, 7]], sampling_params=params).values()
            expected = plain_logprobs(model, [5, 6, 7], output.generated_tokens)
            assert output.logprobs == pytest.approx(expected, abs=1e-5)
            assert generator.verify(1).max <= 1e-5


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has a GPU")


@pytest.fixture
def device(monkeypatch):
    """Enter it with `with`."""
    pytest.importorskip("triton")
    pretend_device(monkeypatch)
    return Pretended()


def merged_by_peft(model):
    """A plain model with the adapters merged, from a copy of this one."""
    other = copy.deepcopy(model)
    other.merge_adapter()
    plain = tiny_model().to(next(model.parameters()).dtype)
    state = {
        n.replace(".base_layer", ""): t for n, t in other.get_base_model().state_dict().items()
    }
    plain.load_state_dict({name: t for name, t in state.items() if "lora_" not in name})
    return plain


@needs_no_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_auto_merges_into_a_copy_what_peft_merges(dtype, device):
    model = lora(dtype).eval()
    train(model)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    expected = tensors_by_name(merged_by_peft(model))
    with device:
        weights = create_weight_sync(hf_compat.unwrap(model.to(DEVICE)), RolloutConfig())
        found = {name: t.cpu() for name, t in tensors_by_name(weights.module).items()}
        after = {name: tensor.cpu() for name, tensor in model.named_parameters()}
    assert isinstance(weights, CopiedWeights)
    assert weights.selection.startswith("adapters merged (a copy adds 0.000 GiB where ")
    # peft rounds the update to the dtype of the weights before it adds it.
    rounding = {"rtol": 2**-7, "atol": 2**-9} if dtype == torch.bfloat16 else {}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **rounding)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def rollouts_there(model):
    """A rollout of merged adapters before they train, and one after; with its plain reference."""
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    config = RolloutConfig(seed=0, block_size=8, use_cuda_graph=False)
    with Pretended(), RolloutGenerator(model.to(DEVICE), config) as generator:
        assert "; adapters merged (" in generator.manager.decode_path
        for seed in range(2):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        noise = torch.Generator().manual_seed(seed)
                        value = torch.randn(parameter.shape, generator=noise) * 0.2
                        parameter.copy_(value.to(DEVICE))
            generator.sync_weights()
            (output,) = generator.generate_batch([[5, 6, 7]], sampling_params=params).values()
            assert output.policy_versions == [(seed + 1, 3)]
            yield output, {name: t.cpu() for name, t in model.named_parameters()}


def differences(model):
    """Nats between each rollout and peft's merged model of the adapters of its version."""
    for output, state in rollouts_there(copy.deepcopy(model)):
        model.load_state_dict(state, strict=False)
        plain = plain_logprobs(merged_by_peft(model), [5, 6, 7], output.generated_tokens)
        yield max(abs(a - b) for a, b in zip(output.logprobs, plain, strict=True))


@pytest.mark.slow
@needs_no_gpu
def test_no_token_of_a_merged_copy_is_from_old_adapters(device, monkeypatch):
    assert max(differences(lora().eval())) <= 1e-5
    is_stale = CopiedWeights._is_stale

    # Later syncs leave out the layers of an adapter.
    def is_wanted(self, weight):
        is_new = weight.names not in self._copied
        return (is_new or not weight.low_ranks) and is_stale(self, weight)

    monkeypatch.setattr(CopiedWeights, "_is_stale", is_wanted)
    *_, last = differences(lora().eval())
    assert last > 0.01


@pytest.mark.slow
@needs_no_gpu
def test_adapters_stay_unmerged_where_a_copy_takes_much_of_the_free_memory(device, caplog):
    caplog.set_level("INFO", "cb_rollout")
    model = lora().eval()
    size = sum(parameter.nbytes for parameter in model.parameters())
    with device:
        Pretended.allocator.others = 2 * GIB - int(3.9 * size)
        config = RolloutConfig(seed=0, block_size=8, use_cuda_graph=False, max_batch_tokens=64)
        with RolloutGenerator(model.to(DEVICE), config) as generator:
            path = generator.manager.decode_path
            assert generator.manager.model is hf_compat.unwrap(model)
        Pretended.allocator.others = 2 * GIB - int(4.6 * size)
        assert isinstance(create_weight_sync(model, config), CopiedWeights)
    assert "; adapters unmerged (a copy adds " in path
    assert path.endswith("; weight_sync='copy' merges them")
    assert "weights: adapters unmerged (a copy adds" in caplog.text


@needs_no_gpu
@pytest.mark.parametrize(
    ("settings", "config", "reason"),
    [
        ({"use_dora": True}, {}, "merges plain LoRA only, not DoraLinearVariant"),
        ({}, {"num_blocks": 8}, "num_blocks is set"),
        ({}, {"numerics": "bitwise"}, ""),
    ],
)
def test_adapters_that_no_copy_can_run_stay_unmerged_on_a_gpu(settings, config, reason, device):
    with device:
        model = lora(**settings).to(DEVICE)
        weights = create_weight_sync(hf_compat.unwrap(model), RolloutConfig(**config))
        assert isinstance(weights, SharedWeights)
        assert reason in weights.selection
        assert weights.selection.startswith("adapters unmerged (") == bool(reason)
        hf_compat.unwrap(model).lm_head.register_forward_hook(lambda *_: None)
        hooked = create_weight_sync(hf_compat.unwrap(model), RolloutConfig())
        assert "(hooks, " in hooked.selection
