"""Hold the rows of a forward: their new tokens, and where their past lies in the cache.

The executor makes a batch from requests; the model runner, attention backends and CUDA graphs read
it. Makes no tensors: rows are lists of numbers. Called by the thread that steps the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.request import Request

if TYPE_CHECKING:
    from cb_rollout.engine.images.prompt_images import PromptImages


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of a forward, one list for each property; some lists may be empty."""

    new_tokens: Sequence[Sequence[int]]
    """Each row's tokens that are not in the cache yet, at least one."""
    lengths: Sequence[int]
    """Number of each row's tokens, the new ones included."""
    table_rows: Sequence[int]
    cache: PagedCache
    table: BlockTable
    position_offsets: Sequence[int] = ()
    """Each row's `Request.position_offset`; empty: 0 for all."""
    rope_sides: Sequence[int] = ()
    """`RowRope.side` of each sequence's whole length; empty: of `lengths`."""
    block_ids: Sequence[Sequence[int]] = ()
    """Blocks of each row's request, which show the rows that share a prompt; empty: unknown."""
    routes: Sequence[Any] = ()
    """Experts that each row's first new tokens took before, and take again: arrays of
    `[tokens, L, K]`, or None; empty: there are none."""
    adapters: Sequence[str | None] = ()
    """Name of each row's adapter, or None for the active ones; empty: None for all."""
    images: "PromptImages | None" = None
    """Images that the only row computes, whose positions are known; None: new tokens are text."""

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        lengths: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
        routes: Sequence[Any] = (),
    ) -> "ForwardBatch":
        """Return a batch of each request's uncomputed tokens up to its length, the last always.

        Args:
            requests: sequences with blocks for `lengths` tokens.
            lengths: tokens of each sequence, including the last token to compute.
            cache: holds their keys and states.
            table: holds their blocks.
            routes: see the field; empty, or a record or None for each request.
        """
        new_tokens: list[list[int]] = []
        for request, length in zip(requests, lengths, strict=True):
            start = min(request.num_computed, length - 1)
            new_tokens.append(request.token_ids[start:length])
        offsets = [request.position_offset for request in requests]
        adapters = [request.params.adapter for request in requests]
        has_routes = any(record is not None for record in routes)
        # A request that computes images runs alone.
        first = requests[0]
        computes_images = first.num_computed < first.num_image_tokens
        return cls(
            new_tokens=new_tokens,
            lengths=lengths,
            table_rows=[request.table_row for request in requests],
            cache=cache,
            table=table,
            position_offsets=offsets if any(offsets) else (),
            rope_sides=[request.rope_side for request in requests],
            block_ids=[request.block_ids for request in requests],
            routes=routes if has_routes else (),
            adapters=adapters if any(adapters) else (),
            images=first.images if computes_images else None,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_new(self) -> list[int]:
        return list(map(len, self.new_tokens))

    @property
    def is_decode(self) -> bool:
        """Return whether each row has one new text token, and tokens before it."""
        if self.images is not None:
            return False
        return max(map(len, self.new_tokens)) == 1 and min(self.lengths) > 1

    @property
    def is_fresh(self) -> bool:
        return self.num_new == list(self.lengths)

    @property
    def rows_of_adapters(self) -> dict[str | None, list[int]]:
        """Return the rows of each adapter; None: the rows of the active adapters."""
        rows: dict[str | None, list[int]] = {}
        for row, adapter in enumerate(self.adapters or [None] * len(self)):
            rows.setdefault(adapter, []).append(row)
        return rows

    def select(self, rows: Sequence[int]) -> "ForwardBatch":
        """Return some of the rows."""
        columns: dict[str, list[Any]] = {}
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, Sequence) and values:
                columns[field.name] = [values[row] for row in rows]
        return replace(self, **columns)
