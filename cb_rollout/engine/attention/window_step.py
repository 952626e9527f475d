"""Attention of one decode step over a window: two batched matrix products a layer.

B: rows of a step, R: rows of the window, T: new tokens of each, B = R x T, H: key heads, G: queries
of each key head, S: columns read, C: columns of the window, D: size of a key or a value.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from cb_rollout.engine.attention.batched import batched_attention
from cb_rollout.engine.attention.choice import BATCHED_DTYPES
from cb_rollout.engine.attention.decode_cache import DecodeLayer
from cb_rollout.engine.attention.places import Form, NotOrdinaryError
from cb_rollout.engine.attention.window import KeyWindow


class WindowStep:
    """Reads a window, for one step."""

    def __init__(
        self,
        window: KeyWindow,
        lengths: Sequence[int],
        lengths_B: torch.Tensor,
        write_places_B: torch.Tensor,
        num_new: int = 1,
    ) -> None:
        """Read a window that holds the rows.

        Args:
            window: where keys and values are.
            lengths: each row's tokens, the new one included, in the window's order.
            lengths_B: int64; the same.
            write_places_B: int64; where in the pages each new token goes.
            num_new: T, rows of each sequence.
        """
        self._num_new = num_new
        self._window, self._write_places_B = window, write_places_B
        self._lengths_B = lengths_B
        self._longest, self._shortest = max(lengths), min(lengths)
        self._lines: dict[tuple[int, int], torch.Tensor] = {}
        self._masks: dict[tuple[int, int | None, int], torch.Tensor] = {}

    def attend(
        self,
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        form: Form,
    ) -> torch.Tensor:
        """See `Reader`; everything in one of `BATCHED_DTYPES`."""
        if query.dtype not in BATCHED_DTYPES or not query.dtype == key.dtype == value.dtype:
            raise NotOrdinaryError(f"its queries are {query.dtype}, its keys {key.dtype}")
        B, num_heads, _, D = query.shape
        H, T = key.shape[1], self._num_new
        R, G = B // T, num_heads // H
        held, pages = self._window.held(layer.index), self._window.pages(layer.index)
        first = max(0, self._shortest - form.window) if form.window else 0
        keys = self._with_new(held[0], pages[0], key, first)
        values = self._with_new(held[1], pages[1], value, first)
        added = None
        if self._shortest < self._longest:
            added = self._mask(H, form.window, query.dtype, G if T > 1 else 1)
        if T == 1:
            output = batched_attention(query.reshape(B * H, -1, D), keys, values, added, form)
            return output.view(B, 1, num_heads, -1)
        # The new tokens of a sequence are further queries of its keys.
        queries = query.view(R, T, H, G, D).transpose(1, 2).reshape(R * H, T * G, D)
        output = batched_attention(queries, keys, values, added, _repeated(form, H, T))
        return output.view(R, H, T, G, -1).transpose(1, 2).reshape(B, 1, num_heads, -1)

    def _with_new(
        self, held_RHCD: torch.Tensor, pages_NF: torch.Tensor, new_BH1D: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Write new states to pages and columns; from column `first` on, `[R x H, S, D]`."""
        B, H, _, D = new_BH1D.shape
        C = held_RHCD.shape[2]
        lines = self._lines.get((H, C))
        if lines is None:
            rows_B1 = (torch.arange(B) // self._num_new)[:, None]
            heads_BH = rows_B1 * H + torch.arange(H)
            lines = self._lines[H, C] = (heads_BH * C + self._lengths_B[:, None] - 1).view(-1)
        new_ND = new_BH1D.reshape(B * H, D)
        pages_NF.index_copy_(0, self._write_places_B, new_ND.view(B, H * D))
        held_RHCD.view(-1, D).index_copy_(0, lines, new_ND)
        return held_RHCD.view(-1, C, D)[: B // self._num_new * H, first : self._longest]

    def _mask(
        self, num_key_heads: int, window: int | None, dtype: torch.dtype, num_queries: int
    ) -> torch.Tensor:
        """What is added to the scores so that each row sees its own columns.

        `[R x H, 1, S]`, or, of several new tokens with `num_queries` each, `[R x H, T x G, S]`.
        """
        key = (num_key_heads, window, num_queries)
        if key not in self._masks:
            first = max(0, self._shortest - window) if window else 0
            columns_S = torch.arange(first, self._longest)
            lengths_B1 = self._lengths_B[:, None]
            is_hidden_BS = columns_S >= lengths_B1
            if window:
                is_hidden_BS |= columns_S < lengths_B1 - window
            added_BS = torch.zeros(is_hidden_BS.shape, dtype=dtype).masked_fill_(
                is_hidden_BS, -torch.inf
            )
            added_BGS = added_BS.repeat_interleave(num_queries, 0)
            added_RQS = added_BGS.view(-1, self._num_new * num_queries, len(columns_S))
            self._masks[key] = added_RQS.repeat_interleave(num_key_heads, 0)
        return self._masks[key]


def _repeated(form: Form, num_key_heads: int, num_new: int) -> Form:
    """A form for several new tokens of each row: sinks for every query of a key head."""
    if form.sinks_H is None:
        return form
    sinks_HG = form.sinks_H.view(num_key_heads, -1)
    return replace(form, sinks_H=sinks_HG.repeat(1, num_new).view(-1))
