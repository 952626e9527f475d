"""Decode steps that read the pages, and graphs of them, give what the gathered path gives."""

import re

import pytest
import torch
from fake_model import request_of
from fast_path import Playback, graphs_of, pretend_cuda
from tiny import plain_logprobs, tiny_model

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.attention import shared_prefix as sharing
from cb_rollout.engine.cuda_graphs import graphs
from cb_rollout.engine.cuda_graphs.decode_path import CudaGraphDecoding
from cb_rollout.engine.request import Request
from cb_rollout.engine.scheduler.scheduler import Scheduler

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on a GPU")

SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
LONG = [3 + (5 * place) % 200 for place in range(70)]
SHORT = [9, 8, 7, 6]


@pytest.fixture
def fast(monkeypatch):
    pretend_cuda(monkeypatch)


def params(**settings):
    return SamplingParams(**{"ignore_eos": True, "max_new_tokens": 3} | settings)


def rollout(generator, inputs, many_params, **settings):
    outputs = generator.generate_batch(inputs, sampling_params=many_params, **settings).values()
    return [output.generated_tokens for output in outputs], [output.logprobs for output in outputs]


def generator_of(model, **settings):
    sizes = {"block_size": 8}
    return RolloutGenerator(model, RolloutConfig(seed=1, **sizes | settings))


def attention_of(generator):
    return generator.manager.engine.runner.backend_selection


def assert_same(found, expected, tolerance=1e-5):
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)


@pytest.mark.parametrize("use_cuda_graph", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tokens_and_log_probabilities_are_those_of_the_gathered_path(use_cuda_graph, monkeypatch):
    """Groups that share a prompt, greedy and sampled, that end one by one."""
    model = tiny_model("qwen3", **SMALL)
    inputs = [LONG, LONG, SHORT, SHORT]
    many = [params(max_new_tokens=6)] * 2 + [params(temperature=0.0)] * 2
    with generator_of(model) as generator:
        expected = rollout(generator, inputs, many)
    pretend_cuda(monkeypatch)
    with generator_of(model, use_cuda_graph=use_cuda_graph) as generator:
        assert attention_of(generator).name == "triton"
        assert_same(rollout(generator, inputs, many), expected)
        assert generator.manager.engine.num_blocks_used == 0
    assert bool(Playback.num_captures) is use_cuda_graph
    for tokens, logprobs in zip(*expected, strict=True):
        prompt = LONG if len(tokens) == 6 else SHORT
        assert logprobs == pytest.approx(plain_logprobs(model, prompt, tokens), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 5},
        pytest.param({"top_p": 0.7, "min_p": 0.01}, marks=pytest.mark.slow),
    ],
    ids=["top-k", "top-p"],
)
def test_truncated_rows_are_sampled_inside_the_graph(asked, fast, monkeypatch):
    """Beside other rows; one joins while the others run."""
    model = tiny_model("qwen3", **SMALL)
    many = [params(**asked), params(max_new_tokens=5), params(**asked)]
    found = []
    for use_cuda_graph in (False, True):
        if use_cuda_graph:
            monkeypatch.delattr(graphs.GraphedDecoding, "logits")
        sizes = {"use_cuda_graph": use_cuda_graph, "max_requests_per_batch": 2}
        with generator_of(model, **sizes) as generator:
            outputs = generator.generate_batch([SHORT] * 3, sampling_params=many).values()
            counters = generator.manager.counters
            truncated = counters.truncated_tokens, counters.kept_tokens
            found.append(([o.generated_tokens for o in outputs], [o.logprobs for o in outputs]))
            found[-1] += (truncated,)
    assert_same(found[1], found[0])
    assert found[1][2:] == found[0][2:]


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"no_repeat_ngram_size": 1}, marks=pytest.mark.slow),
        pytest.param({"repetition_penalty": 1.5, "logit_bias": {4: 3.0}}, marks=pytest.mark.slow),
        {"top_k": 5, "frequency_penalty": 0.5},
        pytest.param({"top_p": 0.7, "min_new_tokens": 2}, marks=pytest.mark.slow),
    ],
    ids=["n-grams", "biased", "penalised", "early"],
)
def test_what_a_graph_cannot_sample_is_sampled_from_its_logits(asked, fast, monkeypatch):
    model = tiny_model("qwen3", **SMALL)
    both = [params(**asked), params(temperature=0.0)]
    with generator_of(model, use_cuda_graph=True) as generator:
        found = rollout(generator, [SHORT, SHORT], both)
    with generator_of(model, use_cuda_graph=False) as generator:
        assert_same(found, rollout(generator, [SHORT, SHORT], both))


@pytest.mark.slow
def test_graphs_are_kept_while_weights_change_in_place_and_the_cache_sleeps_wakes_and_grows(fast):
    model = tiny_model("qwen3", **SMALL)
    greedy = params(temperature=0.0)
    with generator_of(model, use_cuda_graph=True, max_requests_per_batch=1) as generator:
        captured = Playback.num_captures
        assert captured
        rollout(generator, [SHORT], [greedy])
        assert Playback.num_captures == captured
        # Short rows ran the graph that cuts keys, and wanted one that does not.
        generator.manager.warmup()
        captured += 1
        assert Playback.num_captures == captured
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        generator.sync_weights()
        generator.sleep()
        generator.wake()
        tokens, logprobs = rollout(generator, [SHORT], [greedy])
        assert logprobs[0] == pytest.approx(plain_logprobs(model, SHORT, tokens[0]), abs=1e-5)
        generator.generate_batch([LONG], sampling_params=greedy)
        (tokens, logprobs) = rollout(generator, [SHORT], [greedy])
        assert logprobs[0] == pytest.approx(plain_logprobs(model, SHORT, tokens[0]), abs=1e-5)
        assert Playback.num_captures == captured
        model.model.norm.weight.data = model.model.norm.weight.data.clone()
        rollout(generator, [SHORT], [greedy])
        assert Playback.num_captures == captured + 1


def test_no_graph_is_replayed_while_anyone_steps_into_the_forward(fast):
    model, seen = tiny_model("qwen3", **SMALL), []
    hook = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    with generator_of(model, use_cuda_graph=True, max_requests_per_batch=1) as generator:
        graphs_made = graphs_of(generator)
        assert graphs_made.num_graphs == 0
        seen.clear()
        tokens, logprobs = rollout(generator, [SHORT], [params()])
        assert len(seen) == len(tokens[0])
        hook.remove()
        assert rollout(generator, [SHORT], [params(seed=1)])[0]
        assert graphs_made.num_graphs == 1
        captured = Playback.num_captures
        model.enable_input_require_grads()
        rollout(generator, [SHORT], [params()])
        assert (graphs_made.num_graphs, Playback.num_captures) == (1, captured)
        doubled = model.lm_head.register_forward_hook(lambda *args: 2 * args[-1])
        tokens, logprobs = rollout(generator, [SHORT], [params()])
        assert logprobs[0] == pytest.approx(plain_logprobs(model, SHORT, tokens[0]), abs=1e-5)
        doubled.remove()


@pytest.mark.slow
def test_a_replaced_forward_is_captured_and_captured_anew_when_it_is_replaced_again(fast):
    """As Liger, `kernels` and TRL's `cast_lm_head_to_fp32` replace them."""
    model = tiny_model("qwen3", **SMALL)
    mlp, head = model.model.layers[0].mlp, model.lm_head
    head.forward = lambda states: torch.nn.functional.linear(states.float(), head.weight.float())
    with generator_of(model, use_cuda_graph=True, max_requests_per_batch=1) as generator:
        for factor in (1, 2, 3):
            mlp.forward = lambda states, by=factor: by * type(mlp).forward(mlp, states)
            captured = Playback.num_captures
            generator.sync_weights()
            tokens, logprobs = rollout(generator, [SHORT], [params()])
            assert logprobs[0] == pytest.approx(plain_logprobs(model, SHORT, tokens[0]), abs=1e-5)
            assert Playback.num_captures == captured + 1
        assert "hooks" not in generator.manager.decode_path
        hook = model.lm_head.register_forward_hook(lambda *_: None)
        generator.sync_weights()
        rollout(generator, [SHORT], [params()])
        assert "not while the model has forward hooks" in generator.manager.decode_path
        hook.remove()


@pytest.mark.slow
def test_steps_ahead_of_their_tokens_change_none(fast, monkeypatch):
    """Sequences end by stop tokens that only the host finds, and others take their places."""
    collected = []
    launched = CudaGraphDecoding.launched
    monkeypatch.setattr(
        CudaGraphDecoding,
        "launched",
        lambda self: collected.append(launched(self)) or collected[-1],
    )
    model = tiny_model("qwen3", vocab_size=24, **SMALL)
    asked = params(max_new_tokens=8, ignore_eos=False, stop_token_ids=[3, 5, 7])
    found, num_ahead, lengths = [], [], set()
    for looks_ahead in (False, True):
        collected.clear()
        with generator_of(
            model,
            use_cuda_graph=True,
            use_async_batching=looks_ahead,
            max_requests_per_batch=3,
        ) as generator:
            assert ("a step ahead" in generator.manager.decode_path) is looks_ahead
            found.append(rollout(generator, [SHORT, SHORT[::-1]], asked, num_return_sequences=3))
            lengths |= {len(tokens) for tokens in found[-1][0]}
            assert generator.manager.engine.num_blocks_used == 0
        num_ahead.append(sum(map(bool, collected)))
    assert_same(found[1], found[0])
    assert len(lengths) > 2
    assert num_ahead[0] == 0 < num_ahead[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("none left"),
        pytest.param(ValueError("refused"), marks=pytest.mark.slow),
    ],
)
def test_a_step_ahead_that_fails_takes_nothing_from_the_one_before(error, fast, monkeypatch):
    model = tiny_model("qwen3", **SMALL)
    request = request_of(SHORT, max_new_tokens=6)
    launch, num_launched = graphs.GraphedDecoding.launch, []

    def fail_second(self, *args):
        num_launched.append(1)
        if len(num_launched) == 2:
            raise error
        return launch(self, *args)

    monkeypatch.setattr(graphs.GraphedDecoding, "launch", fail_second)
    with generator_of(model, use_cuda_graph=True) as generator:
        engine = generator.manager.engine
        engine.add(request)
        while engine.has_work:
            engine.step()
        assert (request.num_preemptions, request.error) == (0, None)
    tokens = request.token_ids[len(SHORT) :]
    assert len(tokens) == 6
    assert request.logprobs == pytest.approx(plain_logprobs(model, SHORT, tokens), abs=1e-5)


@pytest.mark.slow
def test_what_was_ahead_of_new_weights_is_given_up(fast):
    model = tiny_model("qwen3", **SMALL)
    request = request_of(SHORT, max_new_tokens=8)
    with generator_of(model, use_cuda_graph=True) as generator:
        engine = generator.manager.engine
        engine.add(request)
        for _ in range(3):
            engine.step()
        num_old = request.num_generated
        engine.release_model()
        with torch.no_grad():
            model.lm_head.weight.mul_(3)
        engine.begin_policy_version(1)
        while engine.has_work:
            engine.step()
    assert request.policy_versions == [(0, num_old), (1, 8 - num_old)]
    expected = plain_logprobs(model, SHORT, request.token_ids[len(SHORT) :])
    assert request.logprobs[num_old:] == pytest.approx(expected[num_old:], abs=1e-5)


@pytest.mark.slow
def test_capturing_touches_no_page(fast):
    with generator_of(tiny_model("qwen3", **SMALL), use_cuda_graph=True) as generator:
        rollout(generator, [SHORT], [params()])
        engine = generator.manager.engine
        pages = engine._storage.cache.layers[0].pages
        # Fresh pages hold whatever lay there, and a NaN equals nothing.
        before = [tensor.fill_(1).clone() for tensor in pages]
        made = graphs_of(generator)
        made.add(next(iter(made._graphs)), 8)
        assert all(map(torch.equal, before, pages))


@pytest.mark.slow
def test_only_so_many_graphs_are_kept_and_rows_are_padded_as_asked(fast):
    model = tiny_model("qwen3", **SMALL)
    with generator_of(model, max_cached_graphs=1, q_padding_interval_size=3) as generator:
        rollout(generator, [SHORT] * 4, [params(max_new_tokens=n) for n in (2, 3, 3, 3)])
        assert graphs_of(generator).num_graphs == 1
    # For six rows, which run three too.
    assert Playback.num_captures == 1


@pytest.mark.slow
def test_a_preempted_sequence_resumes_under_graphs_as_if_nothing_had_been(fast, monkeypatch):
    preempted = []
    secure = Scheduler.preempt
    monkeypatch.setattr(
        Scheduler, "preempt", lambda self, rows: (preempted.extend(rows), secure(self, rows))[1]
    )
    model = tiny_model("qwen3", **SMALL)
    many = [params(max_new_tokens=14, temperature=0.0)] * 2
    with generator_of(model, num_blocks=4, use_cuda_graph=True) as generator:
        tokens, logprobs = rollout(generator, [SHORT, SHORT[::-1]], many)
    assert preempted
    assert isinstance(preempted[0], Request)
    for prompt, row, values in zip([SHORT, SHORT[::-1]], tokens, logprobs, strict=True):
        assert values == pytest.approx(plain_logprobs(model, prompt, row), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt_oss", {"sliding_window": 4, "num_hidden_layers": 2}),
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
        pytest.param("lfm2", {}, marks=pytest.mark.slow),
    ],
)
def test_other_families_run_on_the_kernels_too(family, settings, fast):
    model = tiny_model(family, **settings)
    with generator_of(model) as generator:
        assert attention_of(generator).name == "triton"
        tokens, logprobs = rollout(generator, [SHORT * 2], [params()])
    assert logprobs[0] == pytest.approx(plain_logprobs(model, SHORT * 2, tokens[0]), abs=1e-5)


def test_a_window_that_nobody_told_the_cache_of_is_not_believed(fast):
    model = tiny_model("qwen3", **SMALL)
    model.model.layers[0].self_attn.sliding_window = 300
    with generator_of(model) as generator:
        assert attention_of(generator).name == "gathered"
        assert "its attention sees 300 tokens, its cache None" in attention_of(generator).reason


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", r"its forward fails \(ValueError"),
        ("deepseek_v3", "its attention changes the keys that it caches"),
        ("doge", "its attention makes a mask of its own"),
    ],
)
def test_attention_that_the_kernels_do_otherwise_is_gathered(family, reason, fast):
    """Bloom's mask holds a bias; DeepSeek's cache keeps what its attention first unfolds.

    Doge adds a score of each value to its mask, one number for all in a model that is not trained.
    """
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    with generator_of(model) as generator:
        assert attention_of(generator).name == "gathered"
        assert re.search(reason, attention_of(generator).reason)
        tokens, logprobs = rollout(generator, [SHORT], [params()])
    assert logprobs[0] == pytest.approx(plain_logprobs(model, SHORT, tokens[0]), abs=1e-5)
    with pytest.raises(ConfigurationError, match=r"use_cuda_graph=True needs decode steps without"):
        generator_of(model, use_cuda_graph=True)


def test_a_forward_that_waits_for_the_device_is_not_captured(fast, monkeypatch):
    class Refusing(Playback):
        def __call__(self, step):
            raise RuntimeError("operation not permitted when stream is capturing\nat line 7")

    monkeypatch.setattr(graphs, "CudaCapture", Refusing)
    model = tiny_model("qwen3", **SMALL)
    with generator_of(model) as generator:
        assert graphs_of(generator) is None
        assert "(RuntimeError: operation not permitted" in generator.manager.decode_path
        rollout(generator, [SHORT], [params()])
    with pytest.raises(
        ConfigurationError, match="use_cuda_graph=True needs a forward that never waits"
    ):
        generator_of(model, use_cuda_graph=True)


@pytest.mark.parametrize(
    "asked",
    [
        {"use_cuda_graph": True},
        {"use_cuda_graph": (False, True)},
        {"q_padding_interval_size": 16},
        {"max_cached_graphs": 4},
        {"use_async_batching": True},
    ],
)
def test_graphs_are_refused_on_a_cpu_with_what_to_set(asked):
    (name, value), *_ = asked.items()
    with pytest.raises(ConfigurationError) as raised:
        generator_of(tiny_model("qwen3", **SMALL), **asked)
    assert f"{name}={value!r} needs a CUDA device, and the model is on cpu" in str(raised.value)
    assert "leave use_cuda_graph" in str(raised.value)


@pytest.mark.slow
def test_no_graph_is_captured_once_requests_run_and_what_they_wanted_is_in_the_next_pause(
    fast, monkeypatch
):
    """A capture beside a thread that trains would break, and break its step."""
    model = tiny_model("qwen3", **SMALL)
    asked = params(max_new_tokens=9, seed=1)
    with generator_of(model, use_cuda_graph=False) as generator:
        expected = rollout(generator, [SHORT], asked)
    # Keys are cut otherwise from one block to the next.
    monkeypatch.setattr(sharing, "SHORT_STRETCH", 8)
    monkeypatch.setattr(sharing, "STRETCH_INTERVAL", 8)
    with generator_of(model, max_requests_per_batch=2) as generator:
        made = graphs_of(generator)
        captured = Playback.num_captures
        assert captured == made.num_graphs == 2
        assert_same(rollout(generator, [SHORT], asked), expected)
        rollout(generator, [SHORT, SHORT], params(top_k=5))
        assert Playback.num_captures == captured
        generator.sync_weights()
        wanted = made.num_graphs - captured
        assert wanted == Playback.num_captures - captured > 1
        assert_same(rollout(generator, [SHORT], asked), expected)
        generator.sync_weights()
        assert Playback.num_captures == captured + wanted


@pytest.mark.slow
def test_graphs_dropped_in_a_sleep_are_captured_by_the_thread_that_wakes_the_engine(fast):
    model = tiny_model("qwen3", **SMALL)
    greedy = params(temperature=0.0)
    with generator_of(model, max_requests_per_batch=2) as generator:
        made, captured = graphs_of(generator), Playback.num_captures
        expected = rollout(generator, [SHORT], greedy)
        generator.sleep()
        assert made.num_graphs == captured
        generator.wake()
        generator.sleep(release_graphs=True)
        assert made.num_graphs == 0
        generator.wake()
        assert Playback.num_captures == 2 * captured
        assert_same(rollout(generator, [SHORT], greedy), expected)
        assert made.num_graphs == captured
        assert Playback.num_captures == 2 * captured


@pytest.mark.slow
def test_graphs_leave_with_the_weights_and_are_captured_when_the_engine_wakes_after_a_sync(fast):
    model = tiny_model("qwen3", **SMALL)
    with generator_of(model, max_requests_per_batch=2, weight_sync="copy") as generator:
        made, captured = graphs_of(generator), Playback.num_captures
        others = []
        for turn in (2, 3):
            generator.sleep(level=2)
            assert made.num_graphs == 0
            others += [torch.empty_like(parameter) for parameter in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            generator.sync_weights()
            assert made.num_graphs == 0
            generator.wake()
            assert made.num_graphs == captured
            tokens, logprobs = rollout(generator, [SHORT], params())
            plain = plain_logprobs(model, SHORT, tokens[0])
            assert logprobs[0] == pytest.approx(plain, abs=1e-5)
            assert Playback.num_captures == turn * captured


@pytest.mark.slow
def test_graphs_are_kept_when_the_memory_is_planned_again(fast):
    model = tiny_model("qwen3", **SMALL).train()
    optimizer = torch.optim.SGD(model.parameters())
    with generator_of(model, max_requests_per_batch=1) as generator:
        before, captured = generator.memory_plan(), Playback.num_captures
        model(input_ids=torch.tensor([SHORT]), labels=torch.tensor([SHORT])).loss.backward()
        optimizer.step()
        generator.sync_weights()
        assert generator.memory_plan() is not before
        tokens, logprobs = rollout(generator, [SHORT], params())
        assert Playback.num_captures == captured
    assert logprobs[0] == pytest.approx(plain_logprobs(model, SHORT, tokens[0]), abs=1e-5)


@pytest.mark.slow
def test_steps_run_the_graph_of_more_rows_or_none_where_memory_ran_out_in_the_captures(
    fast, monkeypatch
):
    """A capture in the middle of a rollout would stand beside a thread that trains."""
    model = tiny_model("qwen3", **SMALL)
    many = [params(max_new_tokens=length, seed=1) for length in (3, 4, 6)]
    with generator_of(model, use_cuda_graph=False) as generator:
        expected = rollout(generator, [SHORT] * 3, many)
    capture, most = Playback.__call__, 1

    def run_out(self, step):
        if Playback.num_captures == most:
            raise torch.OutOfMemoryError("none left")
        return capture(self, step)

    for most in (1, 0):
        with generator_of(model, max_requests_per_batch=4) as generator:
            made = graphs_of(generator)
            generator.sleep(release_graphs=True)
            Playback.num_captures = 0
            monkeypatch.setattr(Playback, "__call__", run_out)
            generator.wake()
            assert made.num_graphs == most
            assert_same(rollout(generator, [SHORT] * 3, many), expected)
            assert made.num_graphs == most
            monkeypatch.undo()
            pretend_cuda(monkeypatch)
            generator.sync_weights()
            # With memory there again, a pause captures them.
            assert (made.num_graphs > 1) is bool(most)


def test_a_forward_that_cannot_be_captured_any_more_runs_without_graphs_and_a_warning_says_so(
    fast, monkeypatch, caplog
):
    model = tiny_model("qwen3", **SMALL)
    with generator_of(model, max_requests_per_batch=1) as generator:
        capture, mlp = Playback.__call__, model.model.layers[0].mlp

        def refuse(self, step):
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(Playback, "__call__", refuse)
        mlp.forward = lambda states: 2 * type(mlp).forward(mlp, states)
        tokens, logprobs = rollout(generator, [SHORT], [params()])
        assert logprobs[0] == pytest.approx(plain_logprobs(model, SHORT, tokens[0]), abs=1e-5)
        failed = "not now, since capturing the forward failed (RuntimeError: operation not permi"
        assert failed in generator.manager.decode_path
        assert failed in caplog.text
        caplog.clear()
        rollout(generator, [SHORT], [params()])
        assert not caplog.text
        monkeypatch.setattr(Playback, "__call__", capture)
        del mlp.forward
        rollout(generator, [SHORT], [params()])
        assert "not now" not in generator.manager.decode_path
        assert graphs_of(generator).num_graphs == 1
