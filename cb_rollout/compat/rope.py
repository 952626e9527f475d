"""Give each row the rotary frequencies for its own length, not for the longest row of the batch.

transformers 5.23 (`dynamic_rope_update` in modeling_rope_utils.py) chooses the short or the long
factors of `rope_type="longrope"` by the largest position of a call, and keeps the frequencies of
`"dynamic"` for later calls. This module reads the RoPE types that rotary modules name, and knows no
architecture. Called by the thread that runs the model.

B: rows, N: tokens of all rows, Q: tokens of a row, D: size of a rotation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from cb_rollout.compat.transformers import replacing_forward

_LIMIT = "original_max_position_embeddings"


class RowRope:
    """The modules of a model that choose their frequencies by length, and their limits."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: list[tuple[torch.nn.Module, dict[str | None, int]]] = []
        distinct_limits: set[int] = set()
        for module, types in rotary_modules(model):
            limits = _limits_of(module, types)
            if limits:
                self._modules.append((module, limits))
                distinct_limits.update(limits.values())
        self.limits = tuple(sorted(distinct_limits))
        """Tokens of the longest row of each side but the last; empty: the model has one side."""

    def side(self, length: int) -> int:
        """Return the side of a row with this many tokens; see `rope_side`."""
        return rope_side(self.limits, length)

    @contextmanager
    def by_row(self, sides: Sequence[int], counts: Sequence[int] | None = None) -> Iterator[None]:
        """Compute each row with the factors for its whole length, later tokens included.

        `counts`: the number of tokens in each row, if one row of the forward holds all rows; None:
            the rows are separate.
        """
        # transformers itself takes the short factors if no row is long.
        if not any(sides):
            yield
            return
        with ExitStack() as stack:
            for module, limits in self._modules:
                limits_and_sides: dict[str | None, tuple[int, int]] = {}
                for layer_type, limit in limits.items():
                    limits_and_sides[layer_type] = (limit, self.side(limit))
                forward = _selecting(module.forward, limits_and_sides, sides, counts)
                stack.enter_context(replacing_forward(module, forward))
            yield


def _limits_of(module: Any, types: dict[str | None, str]) -> dict[str | None, int]:
    """Return the maximum length for short factors, for each layer type with long factors."""
    parameters = module.config.rope_parameters
    limits: dict[str | None, int] = {}
    for layer_type, rope_type in types.items():
        if rope_type == "longrope":
            of_type = parameters if layer_type is None else parameters[layer_type]
            limits[layer_type] = of_type[_LIMIT]
    return limits


def rope_side(limits: Sequence[int], length: int) -> int:
    """Return how many limits a row exceeds; rows with an equal number share their factors."""
    return sum(length > limit for limit in limits)


def forget_longer_rows(model: torch.nn.Module) -> None:
    """Reset `"dynamic"` frequencies to those of a fresh model.

    transformers 5.23 keeps the frequencies of the longest row so far, and returns to the original
    ones only for a row that is shorter than the limit, not for one of exactly that length.
    """
    for module, types in rotary_modules(model):
        for layer_type, rope_type in types.items():
            if "dynamic" in rope_type:
                named = {} if layer_type is None else {"layer_type": layer_type}
                frequencies = next(module.buffers())
                first = torch.zeros(1, 1, dtype=torch.int64, device=frequencies.device)
                module.forward(frequencies, first, **named)


def rewritten_frequencies(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the frequencies that forwards rewrite for the longest row so far."""
    for module, types in rotary_modules(model):
        if any("dynamic" in name or name == "longrope" for name in types.values()):
            yield from module.buffers(recurse=False)


def rotary_modules(
    model: torch.nn.Module,
) -> Iterator[tuple[Any, dict[str | None, str]]]:
    """Yield the modules that name a RoPE type, with the RoPE type for each layer type."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        types = getattr(module, "rope_type", None)
        if next(module.buffers(recurse=False), None) is None:
            # The module only passes the type on, and computes no frequencies.
            continue
        if isinstance(types, str):
            yield module, {None: types}
        elif isinstance(types, dict):
            named: dict[str | None, str] = {}
            for layer_type, name in types.items():
                if isinstance(name, str):
                    named[layer_type] = name
            yield module, named


def _selecting(
    own: Callable[..., Any],
    limits: dict[str | None, tuple[int, int]],
    sides: Sequence[int],
    counts: Sequence[int] | None,
) -> Callable[..., Any]:
    """Return a rotary module's forward that chooses each row's factors by its side.

    `limits`: for each layer type, the longest row with short factors, and the side of that row.
    """

    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        named = {} if layer_type is None else {"layer_type": layer_type}
        limit, last_side = limits.get(layer_type, (0, max(sides)))
        if max(sides) <= last_side:
            return own(x, position_ids, **named)
        # One position beyond the limit makes transformers use the long factors for all rows.
        beyond = torch.full_like(position_ids[..., :1], limit)
        states = own(x, torch.cat([position_ids, beyond], -1), **named)
        states = tree_map(lambda state: state[..., :-1, :], states)
        if min(sides) <= last_side:
            short = own(x, position_ids.clamp(max=limit - 1), **named)
            is_long = _spread([side > last_side for side in sides], counts, position_ids.device)
            states = tree_map(partial(torch.where, is_long), states, short)
        return states

    return forward


def _spread(
    is_long: list[bool], counts: Sequence[int] | None, device: torch.device
) -> torch.Tensor:
    """Return per-row flags, shaped for states of `[B, Q, D]` or packed states of `[1, N, D]`."""
    of_rows = torch.tensor(is_long, device=device)
    if counts is None:
        return of_rows[:, None, None]
    repeats = torch.tensor(counts, device=device)
    return of_rows.repeat_interleave(repeats, output_size=sum(counts))[None, :, None]
