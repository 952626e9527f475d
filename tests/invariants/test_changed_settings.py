"""What a forward reads beside weights (numbers, configs, adapters, buffers) is followed too."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nightly import slow_after
from peft import LoraConfig, get_peft_model
from tiny import largest_difference, plain_logprobs, tiny_model
from transformers.models.llama.modeling_llama import LlamaMLP

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, packed_logprobs
from cb_rollout.compat.module_state import model_settings
from cb_rollout.engine.attention import traced_forward
from cb_rollout.errors import ConfigurationError, WeightSyncError

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=1)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def softcap(model):
    model.config.final_logit_softcapping = 2.0


def logits_scaling(model):
    model.config.logits_scaling = 4.0


def embedding_multiplier(model):
    model.model.embedding_multiplier = 4.0


def experts_of_a_token(model):
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1


def normalised_experts(model):
    for layer in model.model.layers:
        layer.mlp.gate.norm_topk_prob = not layer.mlp.gate.norm_topk_prob


def window(model):
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 4
    model.config.sliding_window = 4


def attention_scale(model):
    model.model.layers[0].self_attn.scaling *= 3


CHANGES = [
    ("qwen3", attention_scale),
    ("gemma2", softcap),
    ("granite", logits_scaling),
    ("granitemoehybrid", embedding_multiplier),
    ("mixtral", experts_of_a_token),
    ("qwen3_moe", normalised_experts),
    ("mistral", window),
]
CASES = [
    pytest.param(family, change, id=change.__name__, marks=[pytest.mark.slow] * bool(number))
    for number, (family, change) in enumerate(CHANGES)
]


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits


@pytest.mark.parametrize("weight_sync", slow_after(1, ["copy", "shared"]))
@pytest.mark.parametrize(("family", "change"), CASES)
def test_a_changed_setting_is_followed_by_rollouts_after_a_sync(
    family, change, weight_sync, monkeypatch
):
    monkeypatch.setattr(traced_forward, "STEPS_BEFORE_TRACE", 0)
    model = tiny_model(family)
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync=weight_sync)) as generator:
        generator.generate_batch([PROMPT], sampling_params=PARAMS)
        before = logits(model)
        change(model)
        assert not torch.allclose(logits(model), before, atol=1e-3)
        generator.sync_weights()
        (output,) = generator.generate_batch([PROMPT], sampling_params=PARAMS).values()
        assert largest_difference(model, [output]) <= 1e-4
        assert generator.verify(1).max <= 1e-4
        plain = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
        (packed,) = packed_logprobs(model, [output])
        assert packed.tolist() == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize(("family", "change"), CASES)
def test_a_copy_has_the_settings_that_a_model_had_when_it_was_made(family, change):
    model = tiny_model(family)
    change(model)
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="copy")) as generator:
        (output,) = generator.generate_batch([PROMPT], sampling_params=PARAMS).values()
        assert largest_difference(model, [output]) <= 1e-4


class Amplified(torch.nn.Module):
    """A norm whose output a tensor multiplies that is neither a parameter nor a buffer."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.gain = norm, torch.tensor(1.0)

    def forward(self, states):
        return self.norm(states) * self.gain


@pytest.mark.parametrize("is_replaced", slow_after(1, [False, True]))
def test_a_tensor_that_is_an_attribute_is_followed_after_a_sync(is_replaced, monkeypatch):
    monkeypatch.setattr(traced_forward, "STEPS_BEFORE_TRACE", 0)
    model = tiny_model()
    model.model.norm = Amplified(model.model.norm)
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        generator.generate_batch([PROMPT], sampling_params=PARAMS)
        if is_replaced:
            model.model.norm.gain = torch.tensor(0.25)
        else:
            model.model.norm.gain.fill_(0.25)
        generator.sync_weights()
        (output,) = generator.generate_batch([PROMPT], sampling_params=PARAMS).values()
        assert largest_difference(model, [output]) <= 1e-4


class HalvedActivation(torch.nn.SiLU):
    def forward(self, states):
        return super().forward(states) / 2


def test_a_copy_is_refused_where_its_model_has_a_module_that_no_config_names():
    model = tiny_model()
    model.model.layers[0].mlp.act_fn = HalvedActivation()
    with pytest.raises(
        WeightSyncError, match=r"another class .*act_fn \(HalvedActivation for SiLUActivation\)"
    ):
        RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="copy"))


def test_a_copy_is_refused_once_a_module_has_another_class():
    class Halved(torch.nn.SiLU):
        def forward(self, states):
            return super().forward(states) / 2

    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="copy")) as generator:
        generator.sync_weights()
        model.model.layers[0].mlp.act_fn.__class__ = Halved
        with pytest.raises(WeightSyncError, match="changed class"):
            generator.sync_weights()


def test_a_number_of_numpy_is_followed_by_a_copy():
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="copy")) as generator:
        for layer in model.model.layers:
            layer.self_attn.scaling = np.float32(0.9)
        generator.sync_weights()
        (output,) = generator.generate_batch([PROMPT], sampling_params=PARAMS).values()
        assert largest_difference(model, [output]) <= 1e-4


def test_a_forward_that_is_replaced_without_a_sync_begins_a_policy_version():
    model = tiny_model()
    norm = model.model.norm
    own = norm.forward
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        prompt = list(range(5, 45))
        generator.generate_batch([prompt], sampling_params=PARAMS)
        norm.forward = lambda states: own(states) / 2
        (output,) = generator.generate_batch([prompt], sampling_params=PARAMS).values()
        assert largest_difference(model, [output]) <= 1e-4
        assert generator.policy_version == 1


def test_a_copy_refuses_an_adapter_that_is_merged_and_disabled():
    model = adapted()
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="copy")) as generator:
        model.merge_adapter()
        with (
            model.disable_adapter(),
            pytest.raises(ConfigurationError, match="merged and disabled"),
        ):
            generator.sync_weights()


@contextmanager
def disabled(model):
    with model.disable_adapter():
        yield


@contextmanager
def second_adapter(model):
    model.set_adapter("second")
    yield
    model.set_adapter("default")


@contextmanager
def both_adapters(model):
    model.base_model.set_adapter(["default", "second"])
    yield
    model.set_adapter("default")


@contextmanager
def scaled(model):
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.scaling["default"] *= 8
    yield
    layer.scaling["default"] /= 8


@contextmanager
def merged(model):
    """Equal to rounding; keys of the unmerged weights are forgotten all the same."""
    model.merge_adapter()
    yield
    model.unmerge_adapter()


def adapted(family="qwen3"):
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(family), config)
    model.add_adapter("second", config)
    return model.eval()


@pytest.mark.fast_cases("merged")
@pytest.mark.parametrize("switched", [disabled, second_adapter, both_adapters, scaled, merged])
def test_adapters_that_are_switched_without_a_sync_begin_a_policy_version(switched, caplog):
    model = adapted()
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        prompt = list(range(5, 45))
        generator.generate_batch([prompt], sampling_params=PARAMS)
        with switched(model):
            (output,) = generator.generate_batch([prompt], sampling_params=PARAMS).values()
            assert largest_difference(model, [output]) <= 1e-4
            assert generator.policy_version == 1
            assert "active adapters changed without sync_weights()" in caplog.text
        (output,) = generator.generate_batch([prompt], sampling_params=PARAMS).values()
        assert largest_difference(model, [output]) <= 1e-4
        assert generator.policy_version == 2


def test_a_buffer_that_is_written_without_a_sync_begins_a_policy_version():
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        prompt = list(range(5, 45))
        generator.generate_batch([prompt], sampling_params=PARAMS)
        model.model.rotary_emb.inv_freq.mul_(3)
        (output,) = generator.generate_batch([prompt], sampling_params=PARAMS).values()
        assert largest_difference(model, [output]) <= 1e-4
        assert generator.policy_version == 1


@pytest.mark.fast_cases("qwen3_moe")
@pytest.mark.parametrize(
    "family", ["qwen3", "gpt2", "lfm2", "qwen3_moe", "deepseek_v3", "granitemoehybrid", "gpt_oss"]
)
def test_training_and_rollouts_leave_the_settings_of_a_model_as_they_are(family):
    model = tiny_model(family)
    before = model_settings(model)
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        generator.generate_batch([PROMPT], sampling_params=PARAMS)
        model.train()
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
        model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
        generator.sync_weights()
        generator.generate_batch([PROMPT], sampling_params=PARAMS)
        assert generator.policy_version == 1
    assert model_settings(model) == before


def test_a_generator_with_shared_weights_follows_no_other_model():
    model, other = tiny_model(), tiny_model(seed=1)
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        with pytest.raises(WeightSyncError, match="make a RolloutGenerator for the new model"):
            generator.follow(other)
        generator.follow(torch.nn.DataParallel(model))
        (output,) = generator.generate_batch([PROMPT], sampling_params=PARAMS).values()
        assert largest_difference(model, [output]) <= 1e-4


def test_a_generator_with_a_copy_follows_another_model():
    model, other = tiny_model(), tiny_model(seed=1)
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="copy")) as generator:
        generator.follow(other)
        generator.sync_weights()
        (output,) = generator.generate_batch([PROMPT], sampling_params=PARAMS).values()
        assert largest_difference(other, [output]) <= 1e-4
        assert generator.verify(1).max <= 1e-4


class ScaledMLP(LlamaMLP):
    """Scales its output by numbers that are no plain attributes of the module."""

    of_class = 1.0

    def forward(self, x):
        of_mode = 0.3 if self._is_scaled else 1.0
        return super().forward(x) * self.settings.scale * self.tensors[0] * self.of_class * of_mode


def scale_of_an_object(mlp):
    mlp.settings.scale = 0.3


def private_flag(mlp):
    mlp._is_scaled = True


def scale_of_a_class(mlp):
    mlp.__class__ = type("RescaledMLP", (ScaledMLP,), {"of_class": 0.3})


def tensor_in_a_list(mlp):
    mlp.tensors[0] = torch.tensor(0.3)


HIDDEN_CHANGES = (scale_of_an_object, private_flag, scale_of_a_class, tensor_in_a_list)


@pytest.mark.parametrize("change", HIDDEN_CHANGES)
def test_after_a_sync_a_trace_has_the_numbers_that_the_forward_reads_now(change, monkeypatch):
    monkeypatch.setattr(traced_forward, "STEPS_BEFORE_TRACE", 2)
    model = tiny_model("llama", tie_word_embeddings=False)
    changed = [layer.mlp for layer in model.model.layers]
    for mlp in changed:
        mlp.__class__ = ScaledMLP
        mlp.settings = SimpleNamespace(scale=1.0)
        mlp.tensors = [torch.tensor(1.0)]
        mlp._is_scaled = False
    with RolloutGenerator(model, RolloutConfig()) as generator:
        runner = generator.manager.engine.runner

        def roll_out():
            outputs = generator.generate_batch([PROMPT, PROMPT[::-1]], sampling_params=PARAMS)
            return largest_difference(model, outputs.values())

        assert roll_out() < 1e-5
        before = runner.attention_backend.traced_forward.trace
        assert before is not None
        generator.sync_weights()
        assert roll_out() < 1e-5
        # Nothing changed, so nothing is traced again.
        assert runner.attention_backend.traced_forward.trace is before
        for mlp in changed:
            change(mlp)
        generator.sync_weights()
        assert roll_out() < 1e-5
        assert runner.attention_backend.traced_forward.trace not in (None, before)
