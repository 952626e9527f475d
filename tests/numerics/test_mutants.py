"""Kernels of numerics="bitwise" that are broken on purpose: an engine or the state machine sees it.

Some are as they should be in the few rows and columns of the check that an engine makes, and are
left to the random rollouts.
"""

from typing import Any

import pytest
import torch
from bitwise_rollouts import compare_rollouts
from tiny import tiny_model

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator
from cb_rollout.engine.numerics import attention, kernels, operators
from cb_rollout.engine.sampling import draw

# More than the check at an engine's making has.
MANY_ROWS, MANY_KEYS = 200, 40

own_multiply, own_attend = kernels.multiply, kernels.attend


def summed_in_two_halves(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Any:
    half = weight.shape[1] // 2
    first = own_multiply(rows[:, :half].contiguous(), weight[:, :half].contiguous(), bias)
    return first + own_multiply(rows[:, half:].contiguous(), weight[:, half:].contiguous(), None)


def few_rows_otherwise(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Any:
    multiply = own_multiply if rows.shape[0] > 4 else summed_in_two_halves
    return multiply(rows, weight, bias)


def many_rows_otherwise(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Any:
    multiply = own_multiply if rows.shape[0] < MANY_ROWS else summed_in_two_halves
    return multiply(rows, weight, bias)


def attended_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, size: int, scale: float
) -> torch.Tensor:
    """Add values in blocks of so many columns, whatever the padding."""
    B, H, Q, S = *query.shape[:3], key.shape[2]
    mask = torch.ones(Q, S, dtype=torch.bool).tril(S - Q) if mask is None else mask
    seen = mask.expand(B, H, Q, S)
    keys, values = (one.repeat_interleave(H // key.shape[1], 1) for one in (key, value))
    scores = (query @ keys.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    weights = torch.where(seen, scores.softmax(-1), 0.0)
    blocks = zip(weights.split(size, 3), values.split(size, 2), strict=True)
    return sum(some @ of_these for some, of_these in blocks).transpose(1, 2)


def blocks_from_the_padding(query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> Any:
    return attended_in_blocks(query, key, value, mask, 8, settings["scale"])


def split_in_the_middle(query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> Any:
    half = -(-key.shape[2] // 2)
    return attended_in_blocks(query, key, value, mask, half, settings["scale"])


def prompts_from_the_last_key(query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> Any:
    if query.shape[2] == 1:
        return own_attend(query, key, value, mask, **settings)
    Q, S = query.shape[2], key.shape[2]
    mask = torch.ones(Q, S, dtype=torch.bool).tril(S - Q)[None, None] if mask is None else mask
    turned = key.flip(2), value.flip(2), mask.flip(-1)
    return own_attend(query, *turned, **settings | {"is_causal": False})


def many_keys_split(query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> Any:
    if key.shape[2] < MANY_KEYS:
        return own_attend(query, key, value, mask, **settings)
    return blocks_from_the_padding(query, key, value, mask, **settings)


def summed_from_the_last_token(logits_BV: torch.Tensor, tokens_B: torch.Tensor) -> torch.Tensor:
    turned = torch.exp(logits_BV - logits_BV.amax(-1, keepdim=True)).flip(-1)
    total = turned.cumsum(-1)[:, -1].log() + logits_BV.amax(-1)
    return logits_BV.gather(-1, tokens_B[:, None])[:, 0] - total


MULTIPLY, ATTEND = (operators, "multiply"), (attention.kernels, "attend")


@pytest.mark.parametrize(
    ("place", "mutant", "found"),
    [
        (MULTIPLY, few_rows_otherwise, "in a padded batch"),
        (ATTEND, blocks_from_the_padding, "in a padded batch"),
        (ATTEND, split_in_the_middle, "in a padded batch"),
        (ATTEND, prompts_from_the_last_key, "in a padded batch|with a cache"),
    ],
    ids=lambda given: getattr(given, "__name__", "in"),
)
def test_an_engine_refuses(monkeypatch, place, mutant, found):
    monkeypatch.setattr(*place, mutant)
    with pytest.raises(ConfigurationError, match=f"computes different bits.*{found}"):
        RolloutGenerator(tiny_model(), RolloutConfig(numerics="bitwise"))
    assert not operators.are_installed()


@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        (MULTIPLY, many_rows_otherwise),
        (ATTEND, many_keys_split),
        ((draw, "chosen_logprobs"), summed_from_the_last_token),
    ],
    ids=lambda given: getattr(given, "__name__", "in"),
)
def test_random_rollouts_find(monkeypatch, place, mutant):
    monkeypatch.setattr(*place, mutant)
    with pytest.raises(AssertionError, match=r"(padded|alone|packed): .* nats"):
        compare_rollouts("llama", 8)
