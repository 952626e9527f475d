"""Hold the rows of a forward: their new tokens, and where their past lies in the cache.

The executor makes it of requests; the model runner, attention backends and CUDA graphs read it.
Holds lists of numbers, no tensors. Called by the thread that steps the engine.
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
    """The rows of a forward, a list for each property; some may be empty."""

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
    """Blocks of each row's request, by which rows that share a prompt are found; empty: unknown."""
    routes: Sequence[Any] = ()
    """Experts that each row's first new tokens took before, and take again: arrays of
    `[tokens, L, K]`, or None; empty: there are none."""
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
        """Return each request's tokens up to its length that are not computed, the last always."""
        rows = list(zip(requests, lengths, strict=True))
        offsets = [request.position_offset for request in requests]
        first = requests[0]
        return cls(
            [r.token_ids[min(r.num_computed, length - 1) : length] for r, length in rows],
            lengths,
            [request.table_row for request in requests],
            cache,
            table,
            offsets if any(offsets) else (),
            [request.rope_side for request in requests],
            [request.block_ids for request in requests],
            () if all(record is None for record in routes) else routes,
            first.images if first.num_computed < first.num_image_tokens else None,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_new(self) -> list[int]:
        return list(map(len, self.new_tokens))

    @property
    def is_decode(self) -> bool:
        """Return whether each row has one new token, of text, and tokens before it."""
        return not self.images and max(map(len, self.new_tokens)) == 1 < min(self.lengths)

    @property
    def is_fresh(self) -> bool:
        return self.num_new == list(self.lengths)

    def select(self, rows: Sequence[int]) -> "ForwardBatch":
        columns = {
            field.name: [values[row] for row in rows]
            for field in fields(self)
            if isinstance(values := getattr(self, field.name), Sequence) and values
        }
        return replace(self, **columns)
