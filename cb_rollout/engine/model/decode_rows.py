"""Lay out the rows of a decode step: each sequence's last token and its drafted tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cb_rollout.engine.request import Request


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Each row's newest token, and the blocks of its past."""

    token_ids: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each row, the newest included."""
    table_rows: list[int] = field(default_factory=list)
    """Each row's table row; the rows of one sequence share it."""
    block_ids: list[Sequence[int]] = field(default_factory=list)
    """Each row's blocks; the newest token is written to the last."""
    position_offsets: list[int] = field(default_factory=list)
    """Position of each row's token, less its index in the sequence; empty: 0 for all."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        block_size: int,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> "DecodeRows":
        """Return a row for each sequence's last token, followed by its drafted tokens' rows."""
        if not drafts:
            lengths = [len(request.token_ids) for request in requests]
            counts = [-(-length // block_size) for length in lengths]
            return cls(
                [request.token_ids[-1] for request in requests],
                lengths,
                [request.table_row for request in requests],
                [r.block_ids[:count] for r, count in zip(requests, counts, strict=True)],
                [0 if r.images is None else r.position_offset for r in requests],
            )
        rows = cls()
        for request, draft in zip(requests, drafts, strict=True):
            for length, token_id in enumerate((request.token_ids[-1], *draft), request.num_tokens):
                rows.token_ids.append(token_id)
                rows.lengths.append(length)
                rows.position_offsets.append(request.position_offset)
                rows.table_rows.append(request.table_row)
                rows.block_ids.append(request.block_ids[: -(-length // block_size)])
        return rows
