"""Give each row the rotary frequencies of its own length, not those of the longest row beside it.

transformers 5.23 (`dynamic_rope_update` in modeling_rope_utils.py) takes the short or the long
factors of `rope_type="longrope"` by the largest position of a call, and keeps the frequencies of
`"dynamic"` for later calls. Reads the types that rotary modules name, no architecture. Called by
the thread that runs the model.

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
        for module, types in rotary_modules(model):
            if layers := [layer for layer, name in types.items() if name == "longrope"]:
                parameters = module.config.rope_parameters
                limits = {n: (parameters if n is None else parameters[n])[_LIMIT] for n in layers}
                self._modules.append((module, limits))
        self.limits = tuple(sorted({n for _, limits in self._modules for n in limits.values()}))
        """Tokens of the longest row of each side but the last; empty: the model has one side."""

    def side(self, length: int) -> int:
        """Return the side of a row of so many tokens; see `rope_side`."""
        return rope_side(self.limits, length)

    @contextmanager
    def by_row(self, sides: Sequence[int], counts: Sequence[int] | None = None) -> Iterator[None]:
        """Compute each row by the factors of the side of its whole length, later tokens included.

        `counts`: each row's tokens, where one row of the forward holds them all; None: none does.
        """
        # transformers takes the short factors by itself where no row is long.
        if not any(sides):
            yield
            return
        with ExitStack() as stack:
            for module, limits in self._modules:
                last = {layer: (limit, self.side(limit)) for layer, limit in limits.items()}
                forward = _selecting(module.forward, last, sides, counts)
                stack.enter_context(replacing_forward(module, forward))
            yield


def rope_side(limits: Sequence[int], length: int) -> int:
    """Return the number of these limits that a row exceeds: rows of one side have equal factors."""
    return sum(length > limit for limit in limits)


def forget_longer_rows(model: torch.nn.Module) -> None:
    """Have `"dynamic"` frequencies be those of a fresh model.

    transformers 5.23 keeps those of the longest row so far, and takes the first ones again only for
    a row that is shorter than the limit, not as long.
    """
    for module, types in rotary_modules(model):
        for layer_type, rope_type in types.items():
            if "dynamic" in rope_type:
                named = {} if layer_type is None else {"layer_type": layer_type}
                frequencies = next(module.buffers())
                first = torch.zeros(1, 1, dtype=torch.int64, device=frequencies.device)
                module.forward(frequencies, first, **named)


def rewritten_frequencies(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the frequencies that forwards rewrite, by the longest row so far."""
    for module, types in rotary_modules(model):
        if any("dynamic" in name or name == "longrope" for name in types.values()):
            yield from module.buffers(recurse=False)


def rotary_modules(
    model: torch.nn.Module,
) -> Iterator[tuple[Any, dict[str | None, str]]]:
    """Yield the modules that name a RoPE type, with the type of each kind of layer."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        types = getattr(module, "rope_type", None)
        if next(module.buffers(recurse=False), None) is None:
            # It passes the name on, and computes no frequencies.
            continue
        if isinstance(types, str):
            yield module, {None: types}
        elif isinstance(types, dict):
            yield module, {layer: name for layer, name in types.items() if isinstance(name, str)}


def _selecting(
    own: Callable[..., Any],
    limits: dict[str | None, tuple[int, int]],
    sides: Sequence[int],
    counts: Sequence[int] | None,
) -> Callable[..., Any]:
    """Return a rotary module's forward that takes each row's factors by its side.

    `limits`: for each kind of layer the longest row of the short factors, and its side.
    """

    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        named = {} if layer_type is None else {"layer_type": layer_type}
        limit, last_side = limits.get(layer_type, (0, max(sides)))
        if max(sides) <= last_side:
            return own(x, position_ids, **named)
        # One position beyond the limit has transformers take the long factors for all.
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
    """Return flags of rows, shaped for states of `[B, Q, D]`, or packed ones of `[1, N, D]`."""
    of_rows = torch.tensor(is_long, device=device)
    if counts is None:
        return of_rows[:, None, None]
    repeats = torch.tensor(counts, device=device)
    return of_rows.repeat_interleave(repeats, output_size=sum(counts))[None, :, None]
