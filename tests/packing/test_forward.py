"""Completions that go on from the states of a prompt have the gradients of plain rows."""

import random
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from nightly import some_slow
from parity import create_model

from cb_rollout import packed_logprobs
from cb_rollout.packing import batch as batch_module
from cb_rollout.packing import forward as forward_module
from cb_rollout.packing import logprobs as logprobs_module
from cb_rollout.packing.batch import PackingLayout, pack
from cb_rollout.packing.prefix_tree import fork_examples
from cb_rollout.packing.rows import PackedRow

VOCABULARY = 128
FAMILIES = (
    "lfm2",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5_text",
    "granitemoehybrid",
    "bamba",
    "zamba2",
    "falcon_h1",
    "kimi_linear",
    "olmo_hybrid",
)
# A short convolution, and a state-space layer, whose single steps write their states in place.
FAST = FAMILIES[:2]
SOME = some_slow(FAMILIES, FAST)

PROMPT = [3, 4, 5, 6]
ODD_GROUPS = {
    "completions of one token": [[7], [8], [9]],
    "completions of two tokens": [[7, 8], [9, 10]],
    "one of two tokens beside a long one": [[7, 8], list(range(9, 29))],
    "equal completions": [[7, 8, 9]] * 3,
    "equal completions of two tokens": [[7, 8]] * 2,
    "one begins with another": [[7, 8, 9, 10], [7, 8], [7]],
    "a group of one": [[7, 8, 9, 10]],
    "a group of one, of two tokens": [[7, 8]],
}


def a_model(family):
    """A tiny one, with recurrent layers and layers of attention."""
    layers = {"layer_types": ["conv", "full_attention"]} if family == "lfm2" else {}
    return create_model(family, **layers).train()


def random_rows(rng):
    """Groups of every size; most completions have one to three tokens, some prompts have one."""

    def tokens(count):
        return [rng.randrange(3, VOCABULARY) for _ in range(count)]

    rows = []
    for _ in range(rng.randint(1, 3)):
        prompt = tokens(rng.choice([1, 2, 9]))
        longest = tokens(12)
        for _ in range(rng.randint(1, 4)):
            length = rng.choice([1, 2, 2, 3, 12])
            completion = longest[:length] if rng.random() < 0.5 else tokens(length)
            rows.append(PackedRow(prompt, completion))
    rng.shuffle(rows)
    return rows


def scored(model, rows, layout):
    """Log-probabilities, and the gradients of a sum in which each token has its own weight."""
    scores = logprobs_module._scored(model, rows, layout)
    values = [scores[number] for number in range(len(rows))]
    model.zero_grad()
    sum((own * torch.linspace(1, 2, len(own))).sum() for own in values).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return torch.cat(values).detach(), gradients


def alone(model, rows):
    """Each row in a forward of its own."""
    parts = [scored(model, [row], PackingLayout.PADDED) for row in rows]
    names = {name for _, gradients in parts for name in gradients}
    sums = {n: sum(gradients.get(n, 0) for _, gradients in parts) for n in names}
    return torch.cat([values for values, _ in parts]), sums


def distance(gradients, expected):
    zero = torch.zeros(())
    norms = [(gradients.get(n, zero) - g).norm() for n, g in expected.items()]
    return float(torch.stack(norms).norm())


def assert_forks_as_alone(model, rows):
    logprobs, gradients = scored(model, rows, PackingLayout.FORKED_STATES)
    expected, right = alone(model, rows)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)
    assert distance(gradients, right) <= 1e-4 * distance({}, right)


@pytest.mark.fast_cases("lfm2")
@pytest.mark.parametrize("family", SOME)
def test_odd_groups_have_the_gradients_of_plain_rows(family):
    model = a_model(family)
    for completions in ODD_GROUPS.values():
        assert_forks_as_alone(model, [PackedRow(PROMPT, own) for own in completions])
    assert_forks_as_alone(model, [PackedRow(PROMPT[:1], own) for own in ([7, 8], [9], [7, 8, 9])])


@pytest.mark.parametrize("family", SOME)
def test_random_groups_have_the_gradients_of_plain_rows(family):
    model = a_model(family)
    for seed in range(3):
        assert_forks_as_alone(model, random_rows(random.Random(seed)))


@pytest.mark.fast_cases("lfm2")
@pytest.mark.parametrize("family", SOME)
def test_under_autocast_forks_are_as_near_to_float32_as_plain_rows(family):
    model = a_model(family)
    batches = [random_rows(random.Random(seed)) for seed in range(1)]
    batches += [[PackedRow(PROMPT, own) for own in group] for group in ODD_GROUPS.values()]
    of_forks, of_rows = [], []
    for rows in batches:
        _, right = alone(model, rows)
        with torch.autocast("cpu", torch.bfloat16):
            _, forked = scored(model, rows, PackingLayout.FORKED_STATES)
            _, plain = alone(model, rows)
        size = distance({}, right)
        of_forks.append(distance(forked, right) / size)
        of_rows.append(distance(plain, right) / size)
    # The rounding of 16 bits differs between any two orders of sums.
    assert sum(of_forks) <= 1.5 * sum(of_rows) + 1e-3


def prepared_by_accelerate(model):
    AcceleratorState._reset_state(reset_partial_state=True)
    Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    return nullcontext()


CASTS = {
    "around the call": lambda model: torch.autocast("cpu", torch.bfloat16),
    "in the model": prepared_by_accelerate,
}


@pytest.mark.fast_cases("lfm2-in the model")
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("family", SOME)
def test_under_autocast_a_model_is_held_to_the_rounding_of_16_bits(family, cast):
    """Held to that of float32 it would be padded, or refused."""
    model = a_model(family)
    rows = [PackedRow(PROMPT, own) for own in ([7, 8, 9, 10, 11], [7, 12, 13])]
    with CASTS[cast](model):
        layout, reason = logprobs_module._agreeing_layout(model, rows)
    assert layout is PackingLayout.FORKED_STATES, reason


@pytest.mark.parametrize("completions", [[[7, 8, 9, 10], [7, 11, 12]], [[7], [8]]])
def test_the_comparison_has_forks_that_the_first_batch_lacks(monkeypatch, completions):
    """Without padding, the backward pass of one token after a prompt raises in Nemotron-H."""
    monkeypatch.setattr(batch_module, "MIN_FORK_TOKENS", 1)
    used = []

    def watched(rows, numbers, layout, *rest):
        used.append(layout)
        return pack(rows, numbers, layout, *rest)

    monkeypatch.setattr(logprobs_module, "pack", watched)
    model = a_model("nemotron_h")
    outputs = [Output(f"r{n}", PROMPT, own) for n, own in enumerate(completions)]
    packed_logprobs(model, outputs)
    assert used[-1] is PackingLayout.PADDED
    later = packed_logprobs(model, [Output("a", PROMPT, [7, 8]), Output("b", PROMPT, [9, 8])])
    torch.cat(later).sum().backward()


class Output:
    """What `packed_logprobs` reads of an output."""

    def __init__(self, request_id, prompt_ids, generated_tokens):
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.generated_tokens = generated_tokens


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_a_first_batch_without_forks_is_no_proof_of_forks(family):
    """These models ignore the states of several tokens: their forks give other values."""
    model = a_model(family)
    packed_logprobs(model, [Output("a", PROMPT, [7]), Output("b", PROMPT, [8])])
    completions = [[7, 8, 9, 10], [11, 12, 13]]
    later = [Output(f"r{n}", PROMPT, own) for n, own in enumerate(completions)]
    expected, _ = alone(model, [PackedRow(PROMPT, own) for own in completions])
    found = torch.cat(packed_logprobs(model, later)).detach()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_examples_fork_one_token_and_several_whatever_the_rows_have():
    rows = [PackedRow(PROMPT, [7]), PackedRow(PROMPT, [8, 9, 10, 11]), PackedRow(PROMPT[:1], [7])]
    masked = [row._replace(sampling_mask=[[1]] * len(row.completion_ids)) for row in rows]
    one_token, several = fork_examples(masked)
    assert [row.completion_ids for row in one_token] == [[7, 7], [8, 9]]
    assert [row.completion_ids for row in several] == [[7, 7, 7], [8, 9, 10, 11], [7, 7, 7]]
    assert all(row.sampling_mask is None for row in [*one_token, *several])


def test_a_prompt_without_any_gradient_leaves_rows_whole(monkeypatch):
    forward = forward_module._forked_forward

    def cut(own, *arguments, **named):
        calls = []

        def without_graph_at_first(*rest, **settings):
            calls.append(1)
            with torch.set_grad_enabled(len(calls) > 1):
                return own(*rest, **settings)

        return forward(without_graph_at_first, *arguments, **named)

    monkeypatch.setattr(forward_module, "_forked_forward", cut)
    rows = [PackedRow(PROMPT, [7, 8, 9]), PackedRow(PROMPT, [9, 8])]
    layout, reason = logprobs_module._agreeing_layout(a_model("lfm2"), rows)
    assert layout is PackingLayout.PADDED
    assert reason == "2 tokens have a gradient through forked states, and 6 in whole rows"


def test_an_exception_in_the_backward_pass_leaves_rows_whole(monkeypatch):
    """A layer that writes over a state which the backward pass needs, whatever the lengths."""
    repeat = logprobs_module.hf_compat.repeat_states

    def overwritten(cache, *arguments):
        repeat(cache, *arguments)
        for layer in cache.layers:
            if hasattr(layer, "conv_states"):
                state = layer.conv_states[0]
                layer.conv_states[0] = state * torch.ones(1, requires_grad=True)
                state.zero_()

    monkeypatch.setattr(logprobs_module.hf_compat, "repeat_states", overwritten)
    rows = [PackedRow(PROMPT, [7, 8, 9]), PackedRow(PROMPT, [9, 8])]
    layout, reason = logprobs_module._agreeing_layout(a_model("lfm2"), rows)
    assert layout is PackingLayout.PADDED
    assert "modified by an inplace operation" in reason
