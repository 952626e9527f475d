"""A copy generates what the trainer's weights were at the last sync, and touches nothing else."""

from types import SimpleNamespace

import pytest
import torch
from tiny import FAMILIES, largest_difference, tiny_model

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams

COPY = RolloutConfig(weight_sync="copy", seed=0)
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]


def change(model, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_come_from_the_new_weights_after_a_sync_and_from_the_old_before(family):
    model, old = tiny_model(family), tiny_model(family)
    with RolloutGenerator(model, COPY) as generator:
        change(model)
        before = generator.generate_batch(PROMPTS, sampling_params=PARAMS).values()
        assert largest_difference(old, before) <= 1e-5
        assert largest_difference(model, before) > 0.01
        generator.sync_weights()
        after = generator.generate_batch(PROMPTS, sampling_params=PARAMS).values()
        assert largest_difference(model, after) <= 1e-5
        assert generator.verify(2).max <= 1e-5


def test_verify_compares_with_the_forward_of_the_model_that_trains():
    model = tiny_model()
    with RolloutGenerator(model, COPY) as generator:
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        assert generator.verify(2).max <= 1e-5
        change(model)
        assert generator.verify(2).max > 0.01


def test_copied_and_shared_weights_give_the_same_tokens_and_logprobs():
    model = tiny_model()
    results = []
    for weight_sync in ("shared", "copy"):
        config = RolloutConfig(weight_sync=weight_sync, seed=3)
        with RolloutGenerator(model, config) as generator:
            outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS).values()
        results.append([(output.generated_tokens, output.logprobs) for output in outputs])
    assert results[0] == results[1]


def test_the_training_module_is_not_touched_in_any_bit():
    model = tiny_model().train()
    model.model.layers[0].eval()
    model(torch.tensor([PROMPTS[0]])).logits.sum().backward()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    bits = {name: tensor.clone() for name, tensor in tensors.items()}
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    flags = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    with RolloutGenerator(model, COPY) as generator:
        generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        generator.sync_weights()
        generator.verify(2)
        assert {name: module.training for name, module in model.named_modules()} == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, bits[name]) for name, tensor in tensors.items())
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter.grad, grads[name])


def test_the_model_may_train_while_its_copy_generates():
    """No pause: the weights in use are those of the last sync to the end of the rollout."""
    model, old = tiny_model(), tiny_model()
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    with RolloutGenerator(model, COPY) as generator:
        manager = generator.manager
        manager.start()
        ids = manager.add_requests(PROMPTS, sampling_params=params, streaming=True)
        for seed in range(20):
            assert manager.get_result() is not None
            change(model, seed)
        last = {}
        while len(last) < len(ids):
            output = manager.get_result()
            if output.is_finished():
                last[output.request_id] = output
    assert largest_difference(old, last.values()) <= 1e-5


class Autocasting:
    """What the generator reads of accelerate's `Accelerator`."""

    mixed_precision = "bf16"
    process_index = 0
    device = torch.device("cpu")
    state = SimpleNamespace()


@pytest.mark.parametrize("tied", [False, True])
def test_under_autocast_a_copy_gives_bit_by_bit_what_autocast_gives(tied):
    model = tiny_model(tie_word_embeddings=tied)
    results = []
    for weight_sync in ("shared", "copy", "auto"):
        config = RolloutConfig(weight_sync=weight_sync, seed=3)
        with RolloutGenerator(model, config, accelerator=Autocasting()) as generator:
            outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS).values()
            results.append([(output.generated_tokens, output.logprobs) for output in outputs])
            copied = generator.manager.model
    assert results[0] == results[1] == results[2]
    assert copied is not model
    assert copied.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert copied.lm_head.weight.dtype == torch.bfloat16
    assert copied.model.embed_tokens.weight.dtype == torch.float32
    assert copied.model.norm.weight.dtype == torch.float32


def test_a_copy_may_compute_in_another_dtype_than_the_trainer():
    model = tiny_model().to(torch.bfloat16)
    with pytest.raises(ConfigurationError, match="use 'auto', or weight_sync='copy'"):
        RolloutGenerator(model, RolloutConfig(rollout_dtype="float32"))
    exact = tiny_model().to(torch.bfloat16).to(torch.float32)
    config = RolloutConfig(rollout_dtype="float32", weight_sync="copy")
    with RolloutGenerator(model, config) as generator:
        outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS)
    assert largest_difference(exact, outputs.values()) <= 1e-5
    assert model.dtype == torch.bfloat16


def test_what_training_will_still_allocate_is_reserved_for_the_model_that_trains():
    model = tiny_model().train()
    size = sum(parameter.nbytes for parameter in model.parameters())
    with RolloutGenerator(model, COPY) as generator:
        assert generator.memory_plan().training_reserve_bytes >= 3 * size
