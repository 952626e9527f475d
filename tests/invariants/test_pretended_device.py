"""What a GPU would refuse, and how often the host waits for it, on a machine that has none."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from fast_path import graphs_of
from pretend_device import (
    BYTES_PER_ROW,
    DEVICE,
    MIB,
    CapturedThere,
    Pretended,
    Stream,
    on_stream,
    pretend_device,
)
from tiny import char_tokenizer, tiny_model

from cb_rollout import OutOfCacheMemoryError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding, PendingStep
from cb_rollout.engine.kv_cache.offloading import OffloadSpeeds
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.service.plain_forwards import prompt_logprobs

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has a GPU")

SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
INPUTS = [[9, 8, 7, 6], [3, 4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.fixture
def device(monkeypatch):
    """Enter it with `with`."""
    pretend_device(monkeypatch)
    return Pretended()


def rollout(model, asked, sleeps=False, **settings):
    """Token ids and log-probabilities of two groups, and how often the host waited for them."""
    config = RolloutConfig(seed=1, block_size=8, **settings)
    params = SamplingParams(**{"ignore_eos": True, "max_new_tokens": 5, **asked})
    with RolloutGenerator(model, config) as generator:
        if sleeps:
            generator.generate_batch(INPUTS, sampling_params=params)
            generator.sync_weights()
            generator.sleep()
            generator.wake()
        before = Pretended.num_waits
        outputs = generator.generate_batch(INPUTS, sampling_params=params, num_return_sequences=2)
        num_waits = Pretended.num_waits - before
        path = generator.manager.decode_path
        is_offloading = generator.manager.engine._offloader is not None
        assert bool(generator.manager.counters.restored_sequences) is is_offloading
    tokens = [output.generated_tokens for output in outputs.values()]
    return tokens, [output.logprobs for output in outputs.values()], num_waits, path


PENALISED = {"repetition_penalty": 1.3, "logit_bias": {5: 3.0}, "top_logprobs": 3}
CASES = {
    "graphs": ("qwen3", {}, {}),
    "graphs, none ahead": ("qwen3", {}, {"use_async_batching": False}),
    "kernels": ("qwen3", {}, {"use_cuda_graph": False}),
    "replayed masks": ("qwen3", {"top_p": 0.8}, {"sampling_mask": "replay"}),
    "adjusted": ("qwen3", PENALISED, {"max_batch_tokens": 4}),
    "weights in a copy": ("qwen3", {"min_p": 0.1}, {"weight_sync": "copy", "sleeps": True}),
    "preempted": ("qwen3", {"max_new_tokens": 20}, {"num_blocks": 5}),
    "kept keys": ("qwen3", {"max_new_tokens": 20}, {"num_blocks": 10, "cpu_offload_space": 0.01}),
    "kept states": ("lfm2", {"max_new_tokens": 20}, {"num_blocks": 10, "cpu_offload_space": 0.01}),
    "recurrent": ("lfm2", {}, {}),
    "experts": ("qwen3_moe", {}, {}),
    "sinks": ("gpt_oss", {}, {}),
    "a bias of positions": ("bloom", {}, {}),
}
FAST = {"graphs", "recurrent"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:num_return_sequences")
@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES],
)
def test_a_rollout_there_has_the_tokens_of_one_here(case, device, monkeypatch):
    family, asked, settings = CASES[case]
    # Copies there are faster than any prefill.
    monkeypatch.setattr(OffloadSpeeds, "is_copy_faster", lambda *_: True)
    shape = SMALL if family == "qwen3" else {}
    with monkeypatch.context() as here:
        here.setattr(torch.cuda, "is_available", lambda: False)
        expected = rollout(tiny_model(family, **shape), asked, **settings)
    with device:
        found = rollout(tiny_model(family, **shape).to("cuda:0"), asked, **settings)
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert ("triton" in found[3]) is (family != "bloom")
    has_graphs = "CUDA graphs: on" in found[3]
    assert has_graphs is (case not in ("kernels", "a bias of positions"))
    is_ahead = has_graphs and case != "graphs, none ahead" and family != "lfm2"
    assert ("a step ahead" in found[3]) is is_ahead


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "asked", "waits_per_step"),
    [
        ({"use_cuda_graph": True}, {}, 0),
        ({"use_cuda_graph": False}, {}, 1),
        ({"use_cuda_graph": True}, PENALISED, 1),
        ({"use_cuda_graph": True}, {"top_k": 5}, 0),
        ({"use_cuda_graph": True}, {"no_repeat_ngram_size": 2}, 1),
        ({"use_cuda_graph": True, "sampling_mask": "replay"}, {"top_p": 0.8}, 3),
    ],
    ids=["graphs", "kernels", "penalised", "truncated", "n-grams", "replayed masks"],
)
def test_a_step_waits_for_the_device_once_and_more_only_where_truncation_asks_it(
    settings, asked, waits_per_step, device
):
    """The event that ends a graph's step is not counted: the next one was launched before.

    Truncation asks whether its candidates were enough; what it left is fetched where it is kept.
    """
    with device:
        model = tiny_model("qwen3", **SMALL).to("cuda:0")
        short, long = (
            rollout(model, asked | {"max_new_tokens": length}, **settings)[2] for length in (3, 7)
        )
    assert long - short == 4 * waits_per_step


@contextmanager
def full_determinism():
    """What `full_determinism=True` of a trainer switches on."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({}, {}),
        pytest.param({"top_p": 0.8}, {}, marks=pytest.mark.slow),
        pytest.param(PENALISED | {"top_p": 0.8, "top_k": 20}, {}, marks=pytest.mark.slow),
        pytest.param({"min_p": 0.1}, {"use_cuda_graph": False}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8}, {"sampling_mask": "replay"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "top-p", "adjusted", "kernels", "replayed masks"],
)
def test_full_determinism_gives_the_tokens_that_it_gives_without(asked, settings, device):
    with device:
        model = tiny_model("qwen3", **SMALL).to("cuda:0")
        expected = rollout(model, asked, **settings)
        with full_determinism():
            found = rollout(model, asked, **settings)
    assert found[:2] == expected[:2]


def test_what_full_determinism_refuses_is_refused(device):
    with device, full_determinism():
        numbers = torch.ones(3, device="cuda:0")
        with pytest.raises(RuntimeError, match="deterministic"):
            numbers.cumsum(0)
        assert numbers.long().cumsum(0).tolist() == [1, 2, 3]


@pytest.mark.slow
def test_a_new_engine_captures_no_graph_later(device):
    config = RolloutConfig(max_requests_per_batch=4)
    params = SamplingParams(ignore_eos=True, max_new_tokens=3)
    with device, RolloutGenerator(tiny_model(**SMALL).to("cuda:0"), config) as generator:
        graphs = graphs_of(generator)
        assert graphs.num_graphs == 3
        for num_rows in (1, 2, 3):
            generator.generate_batch(INPUTS[:1] * num_rows, sampling_params=params)
        assert graphs.num_graphs == 3


@pytest.mark.slow
def test_memory_of_graphs_and_gaps_between_tensors_are_not_planned_for_the_cache(device):
    """Graphs are captured largest first: the smaller ones fit what the largest took."""
    with device:
        allocator = Pretended.allocator
        allocator.tensors, allocator.gaps, allocator.unused = 100 * MIB, 60 * MIB, 40 * MIB
        config = RolloutConfig(max_requests_per_batch=4)
        with RolloutGenerator(tiny_model(**SMALL).to("cuda:0"), config) as generator:
            plan = generator.memory_plan()
            assert allocator.pool == 4 * BYTES_PER_ROW
            assert plan.graph_bytes == allocator.pool
            assert plan.free_bytes == 1024 * MIB - 160 * MIB - allocator.pool
            assert sum(part.num_bytes for part in plan.parts) == plan.total_bytes
            # Training, which asks while it holds gaps of its own, gets no byte of the graphs.
            assert devices.memory(DEVICE).free_bytes == plan.free_bytes + allocator.gaps
            generator.sleep(release_graphs=True)
            assert (allocator.pool, allocator.unused) == (0, 0)
            generator.manager.engine._plan()
            assert generator.memory_plan() == plan
            generator.wake()
            assert allocator.pool == plan.graph_bytes


def recorded_steps(monkeypatch):
    """What the host did for decode steps, in order: "launch" and "read"."""
    steps = []
    for name, owner in (("launch", GraphedDecoding), ("read", PendingStep)):
        inner = getattr(owner, name)

        def recorded(*args, name=name, inner=inner, **given):
            steps.append(name)
            return inner(*args, **given)

        monkeypatch.setattr(owner, name, recorded)
    return steps


@pytest.mark.slow
def test_steps_launch_ahead_of_their_tokens(device, monkeypatch):
    params = SamplingParams(ignore_eos=True, max_new_tokens=4)
    config = RolloutConfig(seed=1, block_size=8, max_requests_per_batch=8)
    with device:
        steps = recorded_steps(monkeypatch)
        with RolloutGenerator(tiny_model(**SMALL).to("cuda:0"), config) as generator:
            assert "a step ahead" in generator.manager.decode_path
            generator.generate_batch([[5 + row, 6, 7] for row in range(8)], sampling_params=params)
    assert steps == ["launch", *["launch", "read"] * 2, "read"]


def test_graphs_that_find_no_memory_name_what_to_lower(device, monkeypatch):
    def run_out(*_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(CapturedThere, "__call__", run_out)
    with device, pytest.raises(OutOfCacheMemoryError, match="lower max_requests_per_batch"):
        RolloutGenerator(tiny_model(**SMALL).to("cuda:0"))


@pytest.mark.slow
def test_the_streams_of_trainer_and_engine_follow_each_other(device, monkeypatch):
    """The trainer's thread is in a stream of its own, as inside `torch.cuda.stream`."""
    forward, followed = ModelRunner.forward, []

    def checked(self, *args):
        followed.append(Stream.current.follows(training))
        Stream.current.launch()
        return forward(self, *args)

    monkeypatch.setattr(ModelRunner, "forward", checked)
    params = SamplingParams(ignore_eos=True, max_new_tokens=3)
    config = RolloutConfig(max_requests_per_batch=1)
    generating, training = Stream.current, Stream()
    with device:
        with on_stream(training):
            model = tiny_model(**SMALL).to("cuda:0")
            training.launch()
            generator = RolloutGenerator(model, config)
        with generator:
            generator.generate_batch(INPUTS[:1], sampling_params=params)
            for _ in range(2):
                with on_stream(training), generator.manager.paused():
                    assert training.follows(generating)
                    training.launch()
                generator.generate_batch(INPUTS[:1], sampling_params=params)
    assert all(followed)


@pytest.mark.slow
def test_a_copy_generates_on_a_stream_that_training_does_not_hold_up(device, monkeypatch):
    """Each follows the other where a pause hands the weights over, and nowhere else."""
    forward, ran_on, followed = ModelRunner.forward, set(), []

    def checked(self, *args, **given):
        ran_on.add(Stream.current)
        followed.append(Stream.current.follows(training))
        Stream.current.launch()
        return forward(self, *args, **given)

    params = SamplingParams(ignore_eos=True, max_new_tokens=3)
    config = RolloutConfig(weight_sync="copy", max_requests_per_batch=1)
    training = Stream.current
    with device:
        model = tiny_model(**SMALL).to("cuda:0")
        with RolloutGenerator(model, config) as generator:
            monkeypatch.setattr(ModelRunner, "forward", checked)
            for _ in range(2):
                training.launch()
                generator.sync_weights()
                # A pause captures in the thread that paused.
                ran_on.clear()
                followed.clear()
                generator.generate_batch(INPUTS[:1], sampling_params=params)
                assert all(followed)
                (generating,) = ran_on
                assert generating.priority == -1
                assert generating is not training
                with generator.manager.paused():
                    assert training.follows(generating)
            followed.clear()
            training.launch()
            generator.generate_batch(INPUTS[:1], sampling_params=params)
            assert not any(followed)


ENTRIES = {
    "an engine that is made": lambda generator: None,
    "a rollout": lambda generator: generator.generate_batch(
        INPUTS, sampling_params=SamplingParams(max_new_tokens=2)
    ),
    "a warm-up": lambda generator: generator.manager.warmup(),
    "a sync of a model that was cast": lambda generator: (
        generator.manager.engine.model.double(),
        generator.sync_weights(),
    ),
    "a verification": lambda generator: (
        generator.generate_batch(INPUTS, sampling_params=SamplingParams(max_new_tokens=2)),
        generator.verify(1),
    ),
    "log-probabilities of a prompt": lambda generator: prompt_logprobs(
        generator.manager.engine, INPUTS[0], 1.0, 2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_no_forward_runs_while_another_device_is_the_threads_current_one(
    entry, device, monkeypatch
):
    """Kernels launch on the current device, and a model may be on another."""
    current = set()

    def recorded(self, *args, inner=ModelRunner.forward, **given):
        current.add(torch.cuda.current_device())
        return inner(self, *args, **given)

    monkeypatch.setattr(ModelRunner, "forward", recorded)
    with device, RolloutGenerator(tiny_model(**SMALL).to("cuda:0")) as generator:
        ENTRIES[entry](generator)
    assert current == {0}


def test_what_a_device_would_refuse_is_refused(device):
    with device:
        there, here = torch.ones(3, device="cuda:0"), torch.ones(3)
        with pytest.raises(RuntimeError, match=r"takes tensors of cuda:0 and of the cpu"):
            there + here
        assert (there + here.to(there.device)).tolist() == [2, 2, 2]


TOKENIZER = char_tokenizer()
# One token, which `forced_bos_token_id` asks for.
PROMPT = [9]
PLAIN = {"eos_token_id": -1, "max_new_tokens": 5, "seed": 7}


class OneToken:
    """A grammar of one token, again and again."""

    def __init__(self, token):
        self.token = token

    def matcher(self):
        return self

    def fill_allowed_tokens(self, mask_V):
        mask_V[self.token] = True

    def accept_token(self, token_id):
        return True

    def is_terminated(self):
        return False


def parameters_that_change(tokens):
    """Each field off its default, beside others that make it count; then those others alone.

    `tokens`: what is sampled without any of them.
    """
    first, third = tokens[0], tokens[2]
    ends, repeats = {"eos_token_id": third}, {"presence_penalty": -20.0}

    def favoured(scores):
        return scores.index_fill(1, torch.tensor([33], device=scores.device), 50.0)

    return {
        "temperature": ({"temperature": 3.0}, {}),
        "do_sample": ({"do_sample": False}, {}),
        "seed": ({"seed": 8}, {}),
        "top_k": ({"top_k": 1}, {}),
        "top_p": ({"top_p": 0.05}, {}),
        "min_p": ({"min_p": 0.9}, {}),
        "repetition_penalty": ({"repetition_penalty": 1e-4}, {}),
        "presence_penalty": (repeats, {}),
        "frequency_penalty": ({"frequency_penalty": -20.0}, {}),
        "logit_bias": ({"logit_bias": {first: -torch.inf}}, {}),
        "bad_words": ({"bad_words": ((first,),)}, {}),
        "begin_suppress_tokens": ({"begin_suppress_tokens": (first,)}, {}),
        "forced_bos_token_id": ({"forced_bos_token_id": (33,)}, {}),
        "max_new_tokens": ({"max_new_tokens": 4}, {}),
        "max_length": ({"max_new_tokens": None, "max_length": 5}, {}),
        "eos_token_id": (ends, {}),
        "stop_token_ids": ({"stop_token_ids": (third,)}, {}),
        "stop": ({"stop": (TOKENIZER.decode([third]),)}, {}),
        "ignore_eos": ({**ends, "ignore_eos": True}, ends),
        "min_new_tokens": ({**ends, "min_new_tokens": 5}, ends),
        "min_length": ({**ends, "min_length": 6}, ends),
        "top_logprobs": ({"top_logprobs": 2}, {}),
        "sequence_bias": ({"sequence_bias": {(first, 33): 50.0}}, {}),
        "no_repeat_ngram_size": ({**repeats, "no_repeat_ngram_size": 1}, repeats),
        "forced_eos_token_id": ({"forced_eos_token_id": (33,)}, {}),
        "logits_processors": ({"logits_processors": (lambda ids, scores: favoured(scores),)}, {}),
        "grammar": ({"grammar": OneToken(33)}, {}),
    }


def sampled(generator, asked):
    params = [SamplingParams(**{**PLAIN, **one}) for one in asked]
    outputs = generator.generate_batch([PROMPT] * len(params), sampling_params=params).values()
    tops = [[[ids for ids, _ in top] for top in o.top_logprobs or ()] for o in outputs]
    return list(zip([output.generated_tokens for output in outputs], tops, strict=True))


@pytest.mark.slow
def test_every_sampling_parameter_is_honoured_on_every_path(device, monkeypatch):
    config = RolloutConfig(block_size=8)
    shape = {**SMALL, "vocab_size": len(TOKENIZER)}
    with monkeypatch.context() as here:
        here.setattr(torch.cuda, "is_available", lambda: False)
        with RolloutGenerator(tiny_model(**shape), config, tokenizer=TOKENIZER) as generator:
            ((tokens, _),) = sampled(generator, [{}])
            changing = parameters_that_change(tokens)
            names = {field.name for field in dataclasses.fields(SamplingParams)}
            # This model has no adapters; test_named_adapters has those that do.
            assert set(changing) == names - {"adapter"}
            kernel = {name: sampled(generator, pair) for name, pair in changing.items()}
    for name, (found, without) in kernel.items():
        assert found != without, name
    expected = {name: found for name, (found, _) in kernel.items()}
    asked = {name: pair[0] for name, pair in changing.items()}
    can_be_graphed = {n: SamplingParams(**PLAIN | one).can_be_graphed for n, one in asked.items()}
    with device:
        model = tiny_model(**shape).to("cuda:0")
        with RolloutGenerator(model, config, tokenizer=TOKENIZER) as generator:
            assert "CUDA graphs: on" in generator.manager.decode_path
            # Beside one that no graph samples, no row would be sampled in a graph.
            for is_graphed in (True, False):
                names = [name for name in asked if can_be_graphed[name] is is_graphed]
                found = sampled(generator, [asked[name] for name in names])
                assert dict(zip(names, found, strict=True)) == {n: expected[n] for n in names}
