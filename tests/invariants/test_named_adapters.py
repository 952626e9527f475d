"""A sequence is sampled by the adapter that it names, whatever else is in the batch."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from adapters import INVOCATION, move, with_named_adapters
from nightly import slow_after
from peft import LoraConfig, get_peft_model
from tiny import plain_logprobs, tiny_model

from cb_rollout import (
    ConfigurationError,
    IncompleteRolloutError,
    InvalidRequestError,
    RolloutConfig,
    RolloutError,
    RolloutGenerator,
    SamplingParams,
    WeightSyncError,
    generate_batch,
    packed_logprobs,
)
from cb_rollout.engine.attention import traced_forward
from cb_rollout.engine.kv_cache.block_manager import BlockManager
from cb_rollout.engine.model import adapters
from cb_rollout.weights.merged import MergedAdapters

# The models' own warnings, of kernels that are not installed.
pytestmark = pytest.mark.filterwarnings("default")

# Two full blocks of 16 and more.
PROMPT = list(range(5, 45))
NAMES = [None, "two", "one", "three", "two"]
FAMILIES = ["llama", "qwen3_moe", "qwen3", "granitemoehybrid", "qwen3_5_text", "lfm2"]


def params_of(name, **settings):
    chosen = {"max_new_tokens": 10, "ignore_eos": True, "seed": 1} | settings
    return SamplingParams(adapter=name, **chosen)


def expected_logprobs(model, output):
    """Return a plain forward's log-probabilities, with PEFT's own choice of the adapter."""
    expected = copy.deepcopy(model)
    expected.set_adapter(output.adapter or "one")
    return plain_logprobs(expected, output.prompt_ids, output.generated_tokens)


def difference(model, outputs):
    largest = 0.0
    for output in outputs:
        pairs = zip(output.logprobs, expected_logprobs(model, output), strict=True)
        largest = max(largest, *(abs(ours - theirs) for ours, theirs in pairs))
    return largest


def rollout(generator, names=NAMES, **settings):
    params = [params_of(name, **settings) for name in names]
    return list(generator.generate_batch([PROMPT] * len(names), sampling_params=params).values())


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
@pytest.mark.parametrize("family", slow_after(2, FAMILIES))
def test_a_batch_of_several_adapters_has_the_logprobs_of_each(family, weight_sync):
    model = with_named_adapters(family)
    with RolloutGenerator(model, RolloutConfig(block_size=16, weight_sync=weight_sync)) as mixed:
        outputs = rollout(mixed)
        assert [output.adapter for output in outputs] == NAMES
        assert difference(model, outputs) <= 1e-5
        # The prompt is in the cache by now, under each adapter.
        again = rollout(mixed, NAMES[::-1])
        assert difference(model, again) <= 1e-5
    of_name = {output.adapter: output.generated_tokens for output in outputs}
    assert of_name[None] == of_name["one"]
    assert len(set(map(tuple, of_name.values()))) == 3
    for name in ("two", "three"):
        alone = copy.deepcopy(model)
        alone.set_adapter(name)
        with RolloutGenerator(alone, RolloutConfig(block_size=16)) as generator:
            (output,) = rollout(generator, [None])
        assert output.generated_tokens == of_name[name]


@pytest.mark.parametrize("family", slow_after(1, ["llama", "qwen3", "qwen3_moe", "falcon_mamba"]))
def test_in_16_bits_a_batch_of_several_adapters_rounds_as_the_model_does(family):
    model = with_named_adapters(family, torch.bfloat16)
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        outputs = rollout(generator)
        report = generator.verify(len(outputs))
    assert report.agreement
    # Another adapter is farther off than rounding.
    assert difference(model, outputs) < 0.2
    for output in outputs:
        output.adapter = "two" if output.adapter in (None, "one") else "one"
    assert difference(model, outputs) > 0.5


@pytest.mark.parametrize("are_mixed_up", [False, True])
def test_keys_of_an_adapter_are_never_read_by_another(are_mixed_up, monkeypatch):
    if are_mixed_up:
        # So would the numbers be if adapters shared a root.
        monkeypatch.setattr(BlockManager, "_root", lambda self, request: 0)
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        counters = generator.manager.counters
        for name in (None, "two", "one", "three"):
            outputs = rollout(generator, [name])
            is_right = difference(model, outputs) <= 1e-5
            assert is_right != (are_mixed_up and name in ("two", "three"))
            before = counters.prefill_tokens_saved
            rollout(generator, [name])
            # Its own are read: two whole blocks.
            assert counters.prefill_tokens_saved - before == 32


def test_a_manager_takes_requests_of_several_adapters_while_it_runs():
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        manager = generator.manager
        manager.start()
        for name in ("two", None, "three"):
            manager.add_request(PROMPT, request_id=str(name), adapter=name, max_new_tokens=20)
        outputs = {output.request_id: output for output in manager}
    assert difference(model, outputs.values()) <= 1e-5
    assert {output.adapter for output in outputs.values()} == {"two", None, "three"}


def test_a_kept_manager_follows_adapters_that_are_trained():
    model = with_named_adapters("llama")
    config = RolloutConfig(block_size=16)
    for seed in range(2):
        outputs = generate_batch(
            model,
            [PROMPT] * len(NAMES),
            continuous_batching_config=config,
            persistent_manager=True,
            progress_bar=False,
            sampling_params=[params_of(name) for name in NAMES],
        )
        assert difference(model, outputs.values()) <= 1e-5
        move(model, seed)


def test_after_a_sync_every_adapter_has_new_weights_and_a_new_version():
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16, weight_sync="copy")) as generator:
        first = rollout(generator)
        version = generator.policy_version
        assert {tuple(output.policy_versions) for output in first} == {((version, 10),)}
        move(model, 1)
        # A copy has the weights of the last sync.
        assert difference(model, rollout(generator)) > 0.1
        assert generator.sync_weights().policy_version == version + 1
        second = rollout(generator)
        assert {tuple(output.policy_versions) for output in second} == {((version + 1, 10),)}
        assert difference(model, second) <= 1e-5
        assert generator.verify(len(second)).max <= 1e-5


def test_a_trace_runs_the_active_adapters_alone(monkeypatch):
    monkeypatch.setattr(traced_forward, "STEPS_BEFORE_TRACE", 4)
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        rollout(generator, [None])
        backend = generator.manager.engine.runner.attention_backend
        assert backend.traced_forward.trace is not None
        assert difference(model, rollout(generator)) <= 1e-5
        assert backend.traced_forward.trace is not None
        lines = {path.part: path.runs for path in generator.paths}
    assert lines["named adapters"].startswith("one, three, two: ")


def mixing_of(generator):
    return generator.manager.engine.runner.mixing


def test_decode_steps_of_several_adapters_are_one_forward_that_was_proved():
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        rollout(generator, [None, "two", "three"])
        assert mixing_of(generator).has_proved
        calls = []
        model.base_model.model.register_forward_pre_hook(lambda *_: calls.append(1))
        outputs = rollout(generator, ["two", None, "three"])
        # A prefill of each adapter gives the first token, and one step each of the nine others.
        assert len(calls) == 3 + 9
        assert difference(model, outputs) <= 1e-5
        assert "in one forward" in generator.paths[-1].runs
        # Some of them are mixed too.
        assert difference(model, rollout(generator, ["two", "three"])) <= 1e-5
        # A new layer may not be mixed.
        model.add_adapter("four", LoraConfig(task_type="CAUSAL_LM", use_dora=True))
        outputs = rollout(generator, ["two", None, "four"])
        assert difference(model, outputs) <= 1e-5
        assert "Cannot pass `adapter_names` when DoRA is enabled" in generator.paths[-1].runs


@pytest.mark.parametrize("fault", ["another row's adapter", "raises"])
def test_a_mixed_forward_that_computes_otherwise_is_not_used(fault, monkeypatch):
    own = adapters.with_adapter_of_each_row

    def faulty(model, names):
        if fault == "raises":
            raise RuntimeError("no such forward")
        return own(model, names[1:] + names[:1])

    monkeypatch.setattr(adapters, "with_adapter_of_each_row", faulty)
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        assert difference(model, rollout(generator)) <= 1e-5
        assert not mixing_of(generator).has_proved
        assert "a forward for each in a step" in generator.paths[-1].runs


def test_rows_without_a_name_are_mixed_as_the_model_is_set():
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        rollout(generator)
        with model.disable_adapter():
            generator.sync_weights()
            first, second = rollout(generator, [None, "two"])
            plain = plain_logprobs(model, first.prompt_ids, first.generated_tokens)
        assert first.logprobs == pytest.approx(plain, abs=1e-5)
        assert difference(model, [second]) <= 1e-5
        model.base_model.set_adapter(["one", "three"])
        generator.sync_weights()
        first, second = rollout(generator, [None, "two"])
        plain = plain_logprobs(model, first.prompt_ids, first.generated_tokens)
        assert first.logprobs == pytest.approx(plain, abs=1e-5)
        assert difference(model, [second]) <= 1e-5


def test_a_rollout_leaves_the_choice_of_adapters_and_what_trains():
    model = with_named_adapters("llama", modules_to_save=["lm_head"])
    model.set_adapter("two")
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    states = [dict(vars(module)) for module in model.modules()]
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        rollout(generator)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained
    for module, state in zip(model.modules(), states, strict=True):
        for name in ("_active_adapter", "_disable_adapters"):
            assert vars(module).get(name) == state.get(name)
    assert model.active_adapters == ["two"]


@pytest.mark.parametrize(
    ("weight_sync", "settings"),
    [
        ("shared", {"modules_to_save": ["lm_head"]}),
        ("copy", {"modules_to_save": ["lm_head"]}),
        ("shared", {"use_dora": True}),
        ("copy", {"target_modules": ["embed_tokens", "lm_head"]}),
    ],
)
def test_adapters_with_saved_modules_or_other_layers_run(weight_sync, settings):
    model = with_named_adapters("llama", **settings)
    with RolloutGenerator(model, RolloutConfig(block_size=16, weight_sync=weight_sync)) as mixed:
        assert difference(model, rollout(mixed)) <= 1e-5


def with_trained_tokens(named, **settings):
    """Return a model with adapters "one" and "two", of which the named ones train tokens too."""
    model = tiny_model("llama", **settings)
    adapted = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name in ("one", "two"):
            tokens = [5, 6, 7, 40] if name in named else None
            config = LoraConfig(
                task_type="CAUSAL_LM",
                target_modules=["q_proj"],
                trainable_token_indices=tokens,
            )
            if adapted is None:
                adapted = get_peft_model(model, config, adapter_name=name)
            else:
                adapted.add_adapter(name, config)
        move(adapted)
    # PEFT 0.21 leaves the head's tokens of "two" active otherwise.
    adapted.set_adapter("one")
    return adapted.eval()


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("named", [["one"], ["two"], ["one", "two"]])
def test_tokens_that_some_adapters_train_are_those_of_the_named_one(named, settings):
    model = with_trained_tokens(named, **settings)
    names = [None, "two", "one"]
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        outputs = rollout(generator, names)
        assert difference(model, outputs) <= 1e-5
        (scored,) = generator.score([PROMPT], adapter="two")
    alone = copy.deepcopy(model)
    alone.set_adapter("two")
    assert scored.logprobs[1:] == pytest.approx(
        plain_logprobs(alone, PROMPT[:1], PROMPT[1:]), abs=1e-5
    )
    # The loss trains the tokens of the adapter that sampled.
    named_logprobs = packed_logprobs(model, outputs)
    (expected,) = packed_logprobs(alone, outputs[1:2])
    torch.testing.assert_close(named_logprobs[1], expected, rtol=0, atol=1e-5)


def test_a_named_adapter_is_refused_while_trained_tokens_are_merged_in_place():
    model = with_trained_tokens(["one"])
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        model.base_model.model.model.embed_tokens.token_adapter.merge(adapter_names=["one"])
        with pytest.raises(ConfigurationError, match="while one is merged"):
            rollout(generator, ["two"])


def test_the_first_use_of_an_adapter_waits_while_the_trainer_uses_the_model(monkeypatch):
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        manager = generator.manager
        manager.start()
        before = plain_logprobs(model, PROMPT[:1], PROMPT[1:])
        manager.lend_to_trainer()
        has_scored, is_waiting = threading.Event(), threading.Event()
        ran_in_training, may_run_module = [], manager.pauses.may_run_module

        def asked():
            is_allowed = may_run_module()
            if has_scored.is_set():
                is_waiting.set()
            return is_allowed

        def note(*_):
            if threading.current_thread() is other:
                ran_in_training.append(not may_run_module())
                is_waiting.set()

        def use():
            with pytest.raises(RolloutError, match="the trainer uses the model"):
                generator.score([PROMPT])
            has_scored.set()
            manager.add_request(PROMPT, request_id="x", sampling_params=params_of("two"))

        monkeypatch.setattr(manager.pauses, "may_run_module", asked)
        model.base_model.model.model.layers[1].register_forward_pre_hook(note)
        other = threading.Thread(target=use)
        other.start()
        assert is_waiting.wait(60)
        assert plain_logprobs(model, PROMPT[:1], PROMPT[1:]) == before
        generator.wake()
        other.join(60)
    assert ran_in_training
    assert not any(ran_in_training)


def test_a_copy_reads_no_adapter_while_another_thread_may_be_in_an_optimizer_step():
    model = with_named_adapters("llama")

    def use(name):
        return rollout(generator, [name])

    with (
        ThreadPoolExecutor(1) as another_thread,
        RolloutGenerator(model, RolloutConfig(block_size=16, weight_sync="copy")) as generator,
    ):
        # Nothing has changed since the copy was made.
        (output,) = another_thread.submit(use, "two").result()
        assert difference(model, [output]) <= 1e-5
        before, version = copy.deepcopy(model), generator.policy_version
        move(model, 1)
        with pytest.raises(WeightSyncError, match=r"adapter 'three' .* after sync_weights\(\)"):
            another_thread.submit(use, "three").result()
        (output,) = another_thread.submit(use, "two").result()
        assert output.policy_versions == [(version, 10)]
        assert difference(before, [output]) <= 1e-5
        generator.sync_weights()
        (output,) = another_thread.submit(use, "three").result()
        assert difference(model, [output]) <= 1e-5
        move(model, 2)
        # The thread that syncs knows that no step is under way.
        outputs = rollout(generator, ["one", "two"])
        assert difference(model, outputs) <= 1e-5


def params_of_adapter(model, name):
    params = [p for path, p in model.named_parameters() if f".{name}." in path]
    for parameter in params:
        parameter.requires_grad_(True)
        parameter.grad = torch.ones_like(parameter)
    return params


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("trained", ["one", "two"])
def test_a_copy_sees_a_step_of_any_adapter_by_any_optimizer(trained, is_fused):
    model = with_named_adapters("llama")
    params = params_of_adapter(model, trained)
    config = RolloutConfig(block_size=16, weight_sync="copy")
    with ThreadPoolExecutor(1) as another_thread, RolloutGenerator(model, config) as generator:
        # Another thread asks amid a step. Torch counts no write of a fused optimizer.
        torch.optim.AdamW(params[:5], lr=0.1, fused=is_fused).step()
        with pytest.raises(WeightSyncError, match="an optimizer step may be under way"):
            another_thread.submit(rollout, generator, ["two"]).result()
        torch.optim.AdamW(params[5:], lr=0.1, fused=is_fused).step()
        generator.sync_weights()
        (output,) = another_thread.submit(rollout, generator, ["two"]).result()
    assert difference(model, [output]) <= 1e-5


def test_a_step_that_begins_while_a_copy_reads_an_adapter_is_seen(monkeypatch):
    model = with_named_adapters("llama")
    before = copy.deepcopy(model)
    config = RolloutConfig(block_size=16, weight_sync="copy")
    with ThreadPoolExecutor(1) as another_thread, RolloutGenerator(model, config) as generator:
        version = generator.policy_version
        refresh = MergedAdapters.refresh

        def refresh_amid_step(*arguments, **named):
            move(model, 1)
            return refresh(*arguments, **named)

        monkeypatch.setattr(MergedAdapters, "refresh", refresh_amid_step)
        with pytest.raises(WeightSyncError, match="an optimizer step may be under way"):
            another_thread.submit(rollout, generator, ["two"]).result()
        monkeypatch.undo()
        # The copy itself is as the last sync left it.
        (output,) = another_thread.submit(rollout, generator, [None]).result()
    assert output.policy_versions == [(version, 10)]
    assert difference(before, [output]) <= 1e-5


def test_an_adapter_that_its_wrapper_computes_is_refused_though_another_is_active():
    model = with_named_adapters("llama")
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"]}
    model.add_adapter("late", LoraConfig(**settings, alora_invocation_tokens=INVOCATION))
    move(model)
    with (
        RolloutGenerator(model, RolloutConfig(block_size=16)) as generator,
        pytest.raises(ConfigurationError, match="the wrapper computes something itself"),
    ):
        rollout(generator, ["late"])
    assert model.active_adapter == "one"


@pytest.mark.parametrize("module", ["lm_head", "norm"])
def test_a_copy_of_a_model_that_was_cast_keeps_nothing_of_the_former_dtype(module):
    model = with_named_adapters("llama", torch.bfloat16, modules_to_save=[module])
    config = RolloutConfig(block_size=16, weight_sync="copy")
    with RolloutGenerator(model, config) as generator:
        rollout(generator, ["one", "two"])
        model.float()
        move(model, 1)
        generator.sync_weights()
        outputs = rollout(generator, ["one", "two"])
    assert difference(model, outputs) <= 1e-5


def test_a_preempted_sequence_goes_on_with_its_own_adapter():
    model = with_named_adapters("llama")
    config = RolloutConfig(block_size=16, num_blocks=9)
    with RolloutGenerator(model, config) as generator:
        outputs = rollout(generator, ["one", "two", "three"], max_new_tokens=40)
        assert generator.manager.counters.preemptions > 0
    assert difference(model, outputs) <= 1e-5


def test_a_prompt_is_scored_by_the_adapter_that_its_sequence_names():
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        outputs = generator.generate_batch(
            [PROMPT] * 3,
            sampling_params=[params_of(name) for name in (None, "two", "three")],
            prompt_logprobs=2,
        )
    for output in outputs.values():
        expected = copy.deepcopy(model)
        expected.set_adapter(output.adapter or "one")
        plain = plain_logprobs(expected, PROMPT[:1], PROMPT[1:])
        assert output.prompt_logprobs[1:] == pytest.approx(plain, abs=1e-5)
        with RolloutGenerator(model) as scoring:
            (scored,) = scoring.score([PROMPT], adapter=output.adapter)
        assert scored.logprobs[1:] == pytest.approx(plain, abs=1e-5)


def test_a_saved_state_keeps_the_adapter_of_each_sequence():
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        whole = {output.adapter: output for output in rollout(generator, ["two", "three"])}
        manager = generator.manager
        manager.start()
        with manager.pause("keep"):
            for name in ("two", "three"):
                manager.add_request(PROMPT, sampling_params=params_of(name))
            state = generator.state_dict()
    with RolloutGenerator(copy.deepcopy(model), RolloutConfig(block_size=16)) as resumed:
        resumed.load_state_dict(state)
        resumed.manager.start()
        outputs = list(resumed.manager)
    assert {output.adapter for output in outputs} == {"two", "three"}
    for output in outputs:
        assert output.generated_tokens == whole[output.adapter].generated_tokens


def test_an_adapter_that_the_model_has_not_is_refused_by_name():
    model = with_named_adapters("llama")
    with (
        RolloutGenerator(model) as generator,
        pytest.raises(InvalidRequestError, match=r"'four' is no adapter .* has one, three, two;"),
    ):
        rollout(generator, ["four"])
    with (
        RolloutGenerator(model.unload()) as generator,
        pytest.raises(InvalidRequestError, match=r"'two' is no adapter .* has none;"),
    ):
        rollout(generator, ["two"])
    with pytest.raises(InvalidRequestError, match="adapter=3 is no name of an adapter"):
        SamplingParams(adapter=3)


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
def test_an_adapter_that_comes_again_under_its_name_is_another(weight_sync):
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16, weight_sync=weight_sync)) as mixed:
        (first,) = rollout(mixed, ["two"])
        model.delete_adapter("two")
        mixed.sync_weights()
        model.add_adapter("two", LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
        move(model, 1)
        mixed.sync_weights()
        (second,) = rollout(mixed, ["two"])
        assert difference(model, [second]) <= 1e-5
    assert second.generated_tokens != first.generated_tokens


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
def test_a_named_adapter_is_refused_while_another_is_merged_in_place(weight_sync):
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(weight_sync=weight_sync)) as generator:
        model.merge_adapter(["one"])
        with pytest.raises(ConfigurationError, match=r"while one is merged .* unmerge_adapter\(\)"):
            rollout(generator, ["two"])
        model.unmerge_adapter()
        outputs = rollout(generator, ["two"])
    assert difference(model, outputs) <= 1e-4


def test_a_fault_of_an_adapter_fails_its_own_sequences_alone():
    model = with_named_adapters("llama")
    with RolloutGenerator(model, RolloutConfig(block_size=16)) as generator:
        rollout(generator)
        model.delete_adapter("two")
        with pytest.raises(InvalidRequestError, match="has one, three"):
            rollout(generator, ["two"])
        layer = model.base_model.model.model.layers[1].self_attn.q_proj.lora_A["three"]
        layer.weight = torch.nn.Parameter(layer.weight[:, :5])
        with pytest.raises(IncompleteRolloutError) as raised:
            rollout(generator, [None, "three", "one"])
    failed = [output.adapter for output in raised.value.outputs.values() if output.error]
    assert failed == ["three"]
