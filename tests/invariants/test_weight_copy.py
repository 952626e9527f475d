"""A copy generates what the trainer's weights were at the last sync, and touches nothing else."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES, largest_difference, tiny_model

from cb_rollout import (
    ConfigurationError,
    RolloutConfig,
    RolloutError,
    RolloutGenerator,
    SamplingParams,
    WeightSyncError,
)

COPY = RolloutConfig(weight_sync="copy", seed=0)
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]


def change(model, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.fast_cases("llama", "mistral", "bloom")
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


def negated(module, inputs, output):
    return -output


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(negated)


def replaced(model):
    layer = model.model.layers[0].mlp
    own = layer.forward
    # A wrapper that says to be the forward that it wraps.
    layer.forward = functools.wraps(own)(lambda rows: -own(rows))


def test_a_copy_is_refused_where_the_trainer_runs_a_forward_of_its_own():
    model = tiny_model()
    with RolloutGenerator(model, COPY) as generator:
        replaced(model)
        with pytest.raises(WeightSyncError, match=r"a patched forward: .*layers\.0\.mlp.*'shared'"):
            generator.sync_weights()
    with pytest.raises(WeightSyncError, match="shared"):
        RolloutGenerator(model, COPY)


def test_a_copy_tells_of_a_hook_that_it_does_not_run_once(caplog):
    model = tiny_model()
    with RolloutGenerator(model, COPY) as generator:
        assert "hook" not in caplog.text
        hooked(model)
        generator.sync_weights()
        generator.sync_weights()
    assert (
        caplog.text.count("without the training module's forward hooks (model.layers.0.mlp)") == 1
    )


@pytest.mark.fast_cases("replaced")
@pytest.mark.parametrize("changed", [hooked, replaced])
def test_a_model_with_hooks_runs_itself_under_autocast(changed, caplog):
    caplog.set_level("INFO")
    config = RolloutConfig(rollout_dtype="bfloat16", seed=0)
    with RolloutGenerator(tiny_model(), config) as generator:
        assert generator.manager.engine.training_model.is_copied
    model = tiny_model()
    changed(model)
    with RolloutGenerator(model, config) as generator:
        assert not generator.manager.engine.training_model.is_copied
        assert "weights: shared; a copy would not compute model.layers.0.mlp" in caplog.text


def test_a_frozen_weight_that_takes_the_place_of_another_is_copied():
    model = tiny_model()
    layer = model.model.layers[0].self_attn.o_proj
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    new = torch.randn(20, *layer.weight.shape) * 0.1
    with RolloutGenerator(model, COPY) as generator:
        for weight in new:
            # The storage of the weight before is free for this one.
            layer.weight = None
            layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
            generator.sync_weights()
            held = generator.manager.engine.model.model.layers[0].self_attn.o_proj.weight
            assert torch.equal(held, weight)


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
        generator.verify(2)
        generator.sync_weights()
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
    num_processes = 1
    device = torch.device("cpu")
    state = SimpleNamespace()


def weight_bytes(generator):
    storages = {p.untyped_storage() for p in generator.manager.model.parameters()}
    return sum(storage.nbytes() for storage in storages)


def test_a_copy_whose_weights_were_released_generates_as_one_that_never_slept():
    model, old = tiny_model(), tiny_model()
    results = []
    for level in (None, 1, 2):
        model.load_state_dict(old.state_dict())
        with RolloutGenerator(model, COPY) as generator:
            size, found = weight_bytes(generator), []
            for seed in range(3):
                outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS).values()
                found += [(output.generated_tokens, output.logprobs) for output in outputs]
                assert largest_difference(model, outputs) <= 1e-5
                if level:
                    generator.sleep(level)
                    assert generator.is_asleep
                    assert generator.manager.status().kv_bytes == 0
                    assert weight_bytes(generator) == (0 if level == 2 else size)
                change(model, seed)
                generator.sync_weights()
                assert weight_bytes(generator) == size
        results.append(found)
    assert results[0] == results[1] == results[2]


def test_without_its_weights_a_copy_refuses_to_roll_out_until_a_sync():
    model = tiny_model()
    with RolloutGenerator(model, COPY) as generator:
        generator.sleep()
        expected = generator.generate_batch(PROMPTS, sampling_params=PARAMS)
        generator.manager.start()
        for _ in range(2):
            # A sleep that began before is deepened.
            generator.sleep()
            generator.sleep(level=2)
            generator.sleep()
            (late,) = generator.manager.add_requests(PROMPTS[:1], sampling_params=PARAMS)
            for call in (
                generator.wake,
                generator.manager.warmup,
                generator.manager.get_result,
                lambda: generator.generate_batch(PROMPTS, sampling_params=PARAMS),
            ):
                with pytest.raises(RolloutError, match=r"call sync_weights\(\) first"):
                    call()
            # Nothing of a copy is due after a pause of another's.
            with generator.manager.pause():
                pass
            generator.close()
            with pytest.raises(RolloutError, match=r"call sync_weights\(\) first"):
                generator.generate_batch(PROMPTS, sampling_params=PARAMS)
            assert generator.manager.get_result(late).status == "cancelled"
            generator.sync_weights()
            outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS)
            assert outputs.keys() != expected.keys()
            assert largest_difference(model, outputs.values()) <= 1e-5


def test_sequences_in_flight_wait_for_the_weights():
    model = tiny_model()
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=0.0)
    with RolloutGenerator(model, COPY) as generator:
        expected = generator.generate_batch(PROMPTS, sampling_params=params).values()
        manager = generator.manager
        manager.start()
        manager.add_requests(PROMPTS, sampling_params=params, streaming=True)
        assert not manager.get_result().is_finished()
        generator.sleep(level=2)
        generator.sync_weights()
        generator.wake()
        ended = {tuple(o.prompt_ids): o for o in manager if o.is_finished()}
    for output in expected:
        assert ended[tuple(output.prompt_ids)].generated_tokens == output.generated_tokens


@pytest.mark.parametrize("weight_sync", ["shared", "auto"])
def test_weights_that_the_trainer_holds_are_not_released(weight_sync):
    config = RolloutConfig(weight_sync=weight_sync)
    with RolloutGenerator(tiny_model(), config) as generator:
        with pytest.raises(ConfigurationError, match="set weight_sync='copy'"):
            generator.sleep(level=2)
        with pytest.raises(ConfigurationError, match="level=3 of"):
            generator.sleep(level=3)
        assert not generator.is_asleep
    with pytest.raises(ConfigurationError, match="or use release_cache='between_steps'"):
        RolloutGenerator(tiny_model(), replace(config, release_cache="with_weights"))


@pytest.mark.fast_cases("True")
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
        assert generator.memory_plan().training.reserve >= 3 * size
