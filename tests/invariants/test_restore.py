"""The training module and the process are left as they were found."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutError, RolloutGenerator, SamplingParams, generate_batch
from cb_rollout.engine.service.loop import IDLE_SECONDS

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)


def rollout_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cb_rollout"]


def test_training_flags_attention_and_random_state_are_put_back():
    model = tiny_model().train()
    model.model.layers[0].eval()
    flags = {name: module.training for name, module in model.named_modules()}
    attention = model.config._attn_implementation
    state = torch.get_rng_state()
    with RolloutGenerator(model) as generator:
        generator.generate_batch([[5, 6, 7]], sampling_params=PARAMS)
        assert {name: module.training for name, module in model.named_modules()} == flags
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_dropout_is_off_while_generating():
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    with RolloutGenerator(model) as generator:
        generator.generate_batch([[5, 6, 7]] * 2, sampling_params=PARAMS)
        assert generator.verify(2).max <= 1e-5
    assert model.training


def test_sleep_and_close_hold_no_cache_and_leave_no_thread():
    model = tiny_model()
    generator = RolloutGenerator(model, RolloutConfig(seed=0))
    greedy = SamplingParams(temperature=0, max_new_tokens=8)
    first = generator.generate_batch([[5, 6, 7]], sampling_params=greedy)
    assert generator.metrics()["rollout/kv_bytes"] > 0
    generator.sleep()
    assert generator.is_asleep
    assert generator.metrics()["rollout/kv_bytes"] == 0
    generator.wake()
    again = generator.generate_batch([[5, 6, 7]], sampling_params=greedy)
    tokens = [[o.generated_tokens for o in outputs.values()] for outputs in (first, again)]
    assert tokens[0] == tokens[1]
    generator.close()
    assert generator.metrics()["rollout/kv_bytes"] == 0
    assert not rollout_threads()


def test_a_forgotten_generator_ends_its_thread():
    generator = RolloutGenerator(tiny_model())
    generator.generate_batch([[5, 6, 7]], sampling_params=PARAMS)
    assert rollout_threads()
    del generator
    gc.collect()
    assert not rollout_threads()


def test_a_forgotten_model_takes_its_kept_generator_along():
    model = tiny_model()
    generate_batch(model, [[5, 6]], max_new_tokens=2, progress_bar=False, persistent_manager=True)
    (thread,) = rollout_threads()
    forgotten = weakref.ref(model)
    del model
    thread.join(IDLE_SECONDS)
    gc.collect()
    assert forgotten() is None
    thread.join(5 * IDLE_SECONDS)
    assert not thread.is_alive()


def test_the_one_call_function_leaves_nothing_behind():
    model = tiny_model()
    generate_batch(model, [[5, 6, 7]], sampling_params=PARAMS, progress_bar=False)
    assert not rollout_threads()
    assert "_cb_rollout_kept" not in vars(model)


@pytest.mark.parametrize("num_generations", [1, 4])
def test_the_same_seed_gives_the_same_tokens_and_the_next_call_others(num_generations):
    model = tiny_model()
    runs = []
    for _ in range(2):
        with RolloutGenerator(model, RolloutConfig(seed=7)) as generator:
            calls = [
                generator.generate_batch(
                    [[5, 6, 7]],
                    sampling_params=PARAMS,
                    num_return_sequences=num_generations,
                )
                for _ in range(2)
            ]
        runs.append([[o.generated_tokens for o in call.values()] for call in calls])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_a_request_with_its_own_seed_does_not_depend_on_the_batch():
    model = tiny_model()
    own = SamplingParams(max_new_tokens=16, ignore_eos=True, seed=11)
    other = SamplingParams(max_new_tokens=9, ignore_eos=True)
    with RolloutGenerator(model) as generator:
        alone = list(generator.generate_batch([[5, 6, 7]], sampling_params=own).values())
        crowd = list(
            generator.generate_batch(
                [[9] * 40, [5, 6, 7], [8, 8]], sampling_params=[other, own, other]
            ).values()
        )
    assert alone[0].generated_tokens == crowd[1].generated_tokens


def test_two_generators_share_one_model_in_training():
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    with RolloutGenerator(model) as first, RolloutGenerator(model) as second:
        long = SamplingParams(max_new_tokens=300, ignore_eos=True)
        other = threading.Thread(
            target=lambda: second.generate_batch([[8, 9]] * 8, sampling_params=long)
        )
        other.start()
        for _ in range(5):
            first.generate_batch([[5, 6, 7]], sampling_params=PARAMS)
        other.join()
        assert max(first.verify(1).max, second.verify(8).max) <= 1e-5
    assert all(module.training for module in model.modules())


def test_waiting_inside_ones_own_pause_is_refused():
    with RolloutGenerator(tiny_model()) as generator:
        with (
            generator.manager.pause(),
            pytest.raises(RolloutError, match=r"leave the pause\(\) block"),
        ):
            generator.generate_batch([[5]], sampling_params=PARAMS)
        assert len(generator.generate_batch([[5]], sampling_params=PARAMS)) == 1


def test_a_model_compiled_in_place_rolls_out_as_it_is_and_stays_compiled():
    def compile_nothing(*_):
        raise AssertionError

    model = tiny_model(num_hidden_layers=1)
    expected = tokens_of(model)
    modules = [model, model.model.layers[0]]
    for module in modules:
        module.compile(backend=compile_nothing)
    compiled = [module._compiled_call_impl for module in modules]
    assert tokens_of(model) == expected
    assert [module._compiled_call_impl for module in modules] == compiled


def tokens_of(model):
    """Of a rollout that is verified by the training model."""
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        (output,) = generator.generate_batch([[5, 6, 7]], sampling_params=PARAMS).values()
        assert generator.verify(1).max <= 1e-5
    return output.generated_tokens


@pytest.mark.parametrize("pickled", [pickle.dumps, copy.deepcopy])
def test_a_generator_and_a_manager_say_that_they_cannot_be_pickled(pickled):
    generator = RolloutGenerator(tiny_model(num_hidden_layers=1))
    for made in (generator, generator.manager):
        with pytest.raises(RolloutError, match=f"{type(made).__name__} .* cannot be pickled or"):
            pickled(made)


def test_a_model_with_a_kept_generator_can_be_copied_and_pickled():
    model = tiny_model()
    keep = {"progress_bar": False, "persistent_manager": True, "max_new_tokens": 2}
    generate_batch(model, [[5, 6]], **keep)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(generate_batch(twin, [[5, 6]], **keep)) == 1
        generate_batch(twin, [[5, 6]], **(keep | {"persistent_manager": False}))
    generate_batch(model, [[5, 6]], **(keep | {"persistent_manager": False}))
