"""Whatever is replaced in a shared model, it is sampled as it is after the next sync."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tiny import largest_difference, plain_logprobs, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, packed_logprobs
from cb_rollout.engine.attention import traced_forward
from cb_rollout.engine.attention.selector import BackendSelection
from cb_rollout.engine.model import check as model_check
from cb_rollout.errors import InvalidRequestError

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=1)


def data(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = -weight.data


def parameter(model):
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


def untied(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def swapped(model):
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def activation(model):
    model.model.layers[1].mlp.act_fn = torch.nn.Identity()


def number(model):
    model.model.norm.variance_epsilon = 2.0


class Negated(torch.nn.Linear):
    def forward(self, rows):
        return -super().forward(rows)


def layer_of_the_same_weight(model):
    layer = Negated(64, 256, bias=False)
    layer.weight = model.lm_head.weight
    model.lm_head = layer


def buffer(model):
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq * 3, persistent=False)


def adapter(model):
    settings = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    inject_adapter_in_model(settings, model)


def added_layer(model):
    layer = copy.deepcopy(model.model.layers[0])
    layer.self_attn.config = model.config
    layer.self_attn.layer_idx = len(model.model.layers)
    model.model.layers.append(layer)
    model.config.num_hidden_layers += 1
    model.config.layer_types = ["full_attention"] * model.config.num_hidden_layers


CHANGES = [
    data, parameter, untied, swapped, activation, number, layer_of_the_same_weight, buffer, adapter,
    added_layer,
]  # fmt: skip


@pytest.mark.parametrize("path", [pytest.param("traced", marks=pytest.mark.slow), "gathered"])
def test_every_replacement_is_followed_by_rollout_and_packed_loss(path, monkeypatch):
    monkeypatch.setattr(traced_forward, "STEPS_BEFORE_TRACE", 0)
    if path == "gathered":
        gathered = BackendSelection(None, "for comparison")
        monkeypatch.setattr(model_check, "select_backend", lambda *_, **__: gathered)
    model = tiny_model(tie_word_embeddings=True)
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        for change in [lambda _: None, *CHANGES]:
            before = model(torch.tensor([[5, 6, 7]])).logits
            change(model)
            moved = not torch.equal(model(torch.tensor([[5, 6, 7]])).logits, before)
            assert moved == (change in CHANGES)
            generator.sync_weights()
            (output,) = generator.generate_batch([[5, 6, 7, 8]], sampling_params=PARAMS).values()
            assert largest_difference(model, [output]) <= 1e-4, change
            plain = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
            (packed,) = packed_logprobs(model, [output])
            assert packed.tolist() == pytest.approx(plain, abs=1e-4), change
            backend = generator.manager.engine.runner.attention_backend
            assert (backend is None) == (path == "gathered")


def test_the_vocabulary_that_prompts_may_use_is_that_of_the_embedding_now():
    model = tiny_model(num_hidden_layers=1)
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        model.resize_token_embeddings(300, mean_resizing=False)
        generator.sync_weights()
        (output,) = generator.generate_batch([[5, 299]], sampling_params=PARAMS).values()
        assert largest_difference(model, [output]) <= 1e-4
        model.resize_token_embeddings(200, mean_resizing=False)
        generator.sync_weights()
        with pytest.raises(InvalidRequestError, match=r"token id 250, outside .* of 200"):
            generator.generate_batch([[5, 250]], sampling_params=PARAMS)


AUTOCAST = RolloutConfig(seed=0, rollout_dtype="bfloat16")


@pytest.mark.fast_cases("config0-True-True")
@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("used_inside", [False, True])
@pytest.mark.parametrize("config", [RolloutConfig(seed=0), AUTOCAST])
def test_autocast_around_a_generator_changes_nothing(made_inside, used_inside, config):
    model = tiny_model()

    def ambient(is_on):
        return torch.autocast("cpu", torch.bfloat16, enabled=is_on)

    with ambient(made_inside):
        generator = RolloutGenerator(model, config)
    with generator, ambient(used_inside):
        generator.sync_weights()
        (output,) = generator.generate_batch([[5, 6, 7, 8]], sampling_params=PARAMS).values()
        assert generator.verify(1).max <= (1e-5 if config is not AUTOCAST else 0.1)
        packed_logprobs(model, [output])
    with ambient(config is AUTOCAST):
        assert largest_difference(model, [output]) <= (1e-5 if config is not AUTOCAST else 0.1)


def test_a_changed_model_is_probed_as_it_computes_when_it_is_warmed_up_under_autocast():
    model = tiny_model(num_hidden_layers=2)
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        before = generator.manager.memory_plan.bytes_per_block
        activation(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            generator.manager.warmup()
        assert generator.manager.memory_plan.bytes_per_block == before
