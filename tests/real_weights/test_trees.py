"""The packed loss of a real model's conversations is as near to the truth as its rows alone are."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cb_rollout import packed_logprobs
from measure.agreement import QUESTIONS

pytestmark = pytest.mark.slow

EXACT = {torch.float32: torch.float64, torch.bfloat16: torch.float32}


def conversations(folder):
    """Turns of two chats, which fork within an answer, and a retry of the last answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer(question)["input_ids"] for question in QUESTIONS]
    rng, rows = random.Random(0), []
    for first in (0, 4):
        history = texts[first]
        for turn in (1, 2):
            answer = texts[first + turn]
            rows.append((history, answer))
            # A branch leaves the answer in its midst.
            rows.append((history, [*answer[:3], *rng.choice(texts)]))
            history = [*history, *answer, *texts[first + 3]]
        rows += [(history, texts[first + 2])] * 2
    return [
        SimpleNamespace(request_id=f"r{n}", prompt_ids=prompt, generated_tokens=answer)
        for n, (prompt, answer) in enumerate(rows)
    ]


def alone(model, output):
    ids = torch.tensor([[*output.prompt_ids, *output.generated_tokens]])
    first = len(output.prompt_ids)
    logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1]
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return exact.log_softmax(-1).gather(-1, ids[0, first:, None])[:, 0]


def learned(model, scored):
    """Log-probabilities, and gradients of a sum in which some tokens and a row have no weight."""
    weights = [torch.linspace(-1, 1, len(values)).relu() for values in scored]
    weights[2] *= 0
    model.zero_grad()
    sum((values * own).sum() for values, own in zip(scored, weights, strict=True)).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return torch.cat([values.detach().double() for values in scored]), gradients


def distances(found, right):
    """Of log-probabilities, and of all gradients together, relative to their norm."""
    (logprobs, gradients), (expected, others) = found, right
    squares = {name: (gradients[name].double() - g).norm() ** 2 for name, g in others.items()}
    norm = sum(g.double().norm() ** 2 for g in others.values())
    return float((logprobs - expected).norm()), float((sum(squares.values()) / norm) ** 0.5)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_a_tree_learns_what_its_rows_alone_learn(smollm2, dtype):
    outputs = conversations(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype)
    sizes = []
    packed_logprobs(model, outputs)
    handle = model.get_input_embeddings().register_forward_hook(
        lambda *of_call: sizes.append(of_call[2].shape[1])
    )
    found = packed_logprobs(model, outputs)
    handle.remove()
    paths = [(*o.prompt_ids, *o.generated_tokens[:-1]) for o in outputs]
    assert sizes == [len({path[:n] for path in paths for n in range(1, len(path) + 1)})]
    assert 2 * sizes[0] < sum(map(len, paths))
    of_tree = learned(model, found)
    of_rows = learned(model, [alone(model, output) for output in outputs])
    exact = model.to(EXACT[dtype])
    right = learned(exact, [alone(exact, output) for output in outputs])
    of_tree, of_rows = distances(of_tree, right), distances(of_rows, right)
    # A wrong token or key moves log-probabilities by nats, and gradients by their own size.
    assert max(of_rows) < {torch.float32: 1e-3, torch.bfloat16: 2}[dtype], of_rows
    for tree, rows in zip(of_tree, of_rows, strict=True):
        assert tree <= 1.5 * rows, (of_tree, of_rows)


def padded(model, outputs):
    """All rows in one forward, padded on the right."""
    rows = [[*output.prompt_ids, *output.generated_tokens] for output in outputs]
    width = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    scored = []
    for own, row, output in zip(logits, rows, outputs, strict=True):
        first = len(output.prompt_ids)
        labels = torch.tensor(row[first:])[:, None]
        scored.append(own[first - 1 : len(row) - 1].log_softmax(-1).gather(-1, labels)[:, 0])
    return scored


@torch.no_grad()
def test_under_autocast_a_tree_is_no_further_from_rows_alone_than_padding_moves_them(smollm2):
    outputs = conversations(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    exact = torch.cat([alone(model, output) for output in outputs])
    with torch.autocast("cpu", torch.bfloat16):
        tree = torch.cat(packed_logprobs(model, outputs))
        rows = torch.cat([alone(model, output) for output in outputs])
        moved = torch.cat(padded(model, outputs))
    assert (tree - rows).norm() <= 1.5 * (moved - rows).norm()
    assert (tree - exact).norm() <= 1.5 * (rows - exact).norm()
    # A path of another precision would be nearer to float32 than bfloat16 allows.
    assert (tree - exact).norm() >= 0.5 * (rows - exact).norm()
