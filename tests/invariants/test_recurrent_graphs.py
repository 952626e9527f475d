"""Captured steps move recurrent states as a forward outside of a graph does."""

import pytest
import torch
from device_laws import CAPTURED, ROUNDING, Autocasting
from fake_model import request_of
from fast_path import Playback, graphs_of, pretend_cuda
from pretend_device import DEVICE, Pretended, pretend_device
from tiny import plain_logprobs, tiny_model

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on a GPU")

MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2}
MODELS = {
    "short convolutions": ("lfm2", {}),
    "Mamba 2 alone": ("mamba2", MAMBA2),
    "Mamba alone": ("mamba", {"state_size": 16}),
    "Mamba 2 beside attention": ("granitemoehybrid", {}),
    "linear attention beside attention": ("qwen3_5_text", {}),
}
FAST = {"Mamba 2 alone"}
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]

HYBRID = "lfm2"
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
LONG = [3 + (5 * place) % 200 for place in range(20)]
SHORT = [9, 8, 7, 6]


@pytest.fixture
def fast(monkeypatch):
    pretend_cuda(monkeypatch)


def params(**settings):
    return SamplingParams(**{"ignore_eos": True, "max_new_tokens": 5} | settings)


def generator_of(model, **settings):
    return RolloutGenerator(model, RolloutConfig(seed=1, **{"block_size": 8} | settings))


def rolled_out(generator):
    """Token ids and log-probabilities of groups of two, sampled and greedy, that end one by one."""
    prompts = [LONG, LONG, SHORT, SHORT, SHORT[::-1]]
    many = [
        params(max_new_tokens=n, temperature=t)
        for n, t in zip((6, 2, 3, 4, 5), (1, 1, 0, 0, 1), strict=True)
    ]
    outputs = generator.generate_batch(prompts, sampling_params=many).values()
    return [o.generated_tokens for o in outputs], [o.logprobs for o in outputs]


def stepped(engine, request, between):
    """Run a sequence to its end, and call a function after each step."""
    engine.add(request)
    while engine.has_work:
        engine.step()
        between()


def assert_plain(model, request, num_left_out=0):
    """Its log-probabilities are those of a forward without a cache, but for the first ones."""
    tokens = request.token_ids[len(request.prompt_ids) :]
    expected = plain_logprobs(model, request.prompt_ids, tokens)
    assert len(tokens) == request.max_new_tokens
    found = request.logprobs[num_left_out:]
    assert found == pytest.approx(expected[num_left_out:], abs=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_captured_rollout_has_the_tokens_of_one_without_graphs(name, monkeypatch):
    """On a device that refuses every wait in a capture."""
    family, settings = MODELS[name]
    with monkeypatch.context() as here:
        here.setattr(torch.cuda, "is_available", lambda: False)
        with generator_of(tiny_model(family, **settings)) as generator:
            expected = rolled_out(generator)
    pretend_device(monkeypatch)
    with Pretended(), generator_of(tiny_model(family, **settings).to(DEVICE)) as generator:
        engine = generator.manager.engine
        assert "triton" in engine.paged_model.describe_decoding()
        assert engine.paged_model.describe_decoding().endswith("CUDA graphs: on")
        found = rolled_out(generator)
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        # Mamba's own forward is 3e-5 off float64.
        assert ours == pytest.approx(theirs, abs=1e-4 if family == "mamba" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_states_are_captured_in_trls_default_precision(family, monkeypatch):
    pretend_device(monkeypatch)
    trained = tiny_model(family, **ATTENTION)
    with Pretended():
        model = tiny_model(family, **ATTENTION).to(DEVICE)
        config = RolloutConfig(seed=1, block_size=8)
        with RolloutGenerator(model, config, accelerator=Autocasting(DEVICE)) as generator:
            assert CAPTURED in generator.manager.decode_path
            outputs = generator.generate_batch([LONG], sampling_params=params()).values()
    for output in outputs:
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain_logprobs(trained, LONG, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=ROUNDING)


def test_a_pause_between_steps_moves_no_state_twice(fast):
    """A step that is launched ahead, and given up in the pause, would."""
    model = tiny_model(HYBRID, **ATTENTION)
    request = request_of(SHORT, max_new_tokens=8)
    with generator_of(model, use_cuda_graph=True, max_requests_per_batch=1) as generator:
        engine = generator.manager.engine
        stepped(engine, request, engine.release_model)
    assert_plain(model, request)


@pytest.mark.parametrize("keeps_keys", [pytest.param(True, marks=pytest.mark.slow), False])
def test_tokens_after_a_sync_are_of_the_new_weights_and_say_so(keeps_keys, fast):
    model = tiny_model(HYBRID, **ATTENTION)
    request, num_old = request_of(SHORT, max_new_tokens=8), []

    def sync_once():
        if request.num_generated == 3 and not num_old:
            engine.release_model()
            num_old.append(request.num_generated)
            with torch.no_grad():
                # No state depends on the head.
                model.lm_head.weight.mul_(3)
            engine.begin_policy_version(1, keep_keys=keeps_keys)

    with generator_of(model, use_cuda_graph=True, max_requests_per_batch=1) as generator:
        engine = generator.manager.engine
        stepped(engine, request, sync_once)
    assert request.policy_versions == [(0, 3), (1, 5)]
    assert_plain(model, request, num_left_out=3)


def test_graphs_find_states_that_were_allocated_anew(fast):
    model = tiny_model(HYBRID, **ATTENTION)
    with generator_of(model, use_cuda_graph=True, max_requests_per_batch=1) as generator:
        engine, kept, captured = generator.manager.engine, [], Playback.num_captures
        for _ in range(2):
            request = request_of(SHORT)
            stepped(engine, request, lambda: None)
            # Held, so that the next states lie elsewhere.
            kept.append(engine._storage.cache)
            generator.sleep()
            generator.wake()
            assert_plain(model, request)
        assert not {*kept[0].addresses} & {*kept[1].addresses} - {0}
        assert Playback.num_captures == captured


def test_capturing_moves_no_state(fast):
    with generator_of(tiny_model("mamba2", **MAMBA2), use_cuda_graph=True) as generator:
        generator.generate_batch([SHORT], sampling_params=params())
        engine = generator.manager.engine
        before = [tensor.fill_(1).clone() for tensor in engine._storage.cache.tensors]
        made = graphs_of(generator)
        made.add(next(iter(made._graphs)), 8)
        assert all(map(torch.equal, before, engine._storage.cache.tensors))


@pytest.mark.slow
def test_a_preempted_sequence_resumes_under_graphs_as_if_nothing_had_been(fast):
    model = tiny_model(HYBRID, **ATTENTION)
    requests = [request_of(SHORT, max_new_tokens=14, name=name) for name in "ab"]
    with generator_of(model, num_blocks=4, use_cuda_graph=True) as generator:
        engine = generator.manager.engine
        engine.add(requests[0])
        stepped(engine, requests[1], lambda: None)
    assert sum(request.num_preemptions for request in requests)
    for request in requests:
        assert_plain(model, request)


def test_a_forward_that_raises_when_some_states_moved_is_not_run_again_on_them(fast):
    model = tiny_model(
        HYBRID, layer_types=["conv", "full_attention", "conv", "conv"], num_hidden_layers=4
    )
    requests = [request_of(SHORT, max_new_tokens=5, name=name) for name in "ab"]
    layer, forward, num_calls = model.model.layers[3], model.model.layers[3].forward, []

    def raise_once(*args, **kwargs):
        num_calls.append(1)
        if requests[0].num_generated == 2 and len(num_calls) < 1000:
            num_calls.extend([1] * 1000)
            raise ValueError("once")
        return forward(*args, **kwargs)

    with generator_of(model, use_cuda_graph=False) as generator:
        engine = generator.manager.engine
        assert "triton" in engine.paged_model.describe_decoding()
        layer.forward = raise_once
        engine.add(requests[0])
        stepped(engine, requests[1], lambda: None)
    assert len(num_calls) > 1000
    assert [request.error for request in requests] == [None, None]
    for request in requests:
        assert_plain(model, request)


def test_no_more_rows_are_captured_than_states_fit(fast):
    model = tiny_model("mamba2", **MAMBA2)
    settings = {"max_requests_per_batch": 64, "max_memory_percent": 1e-5}
    with generator_of(model, use_cuda_graph=True, **settings) as generator:
        engine = generator.manager.engine
        assert engine.memory_plan.num_slots < 64
        assert max(key.num_rows for key in graphs_of(generator)._graphs) < 64


def test_steps_ahead_are_refused_where_states_would_move_twice(fast):
    reason = "use_async_batching=True needs a model without recurrent states"
    with pytest.raises(ConfigurationError, match=reason):
        generator_of(tiny_model(HYBRID), use_async_batching=True)
