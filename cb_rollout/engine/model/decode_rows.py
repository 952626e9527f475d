"""The rows of one decode step: a token of each sequence, and those that it is expected to say."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cb_rollout.engine.request import Request


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """What is computed: each row's newest token, and where its past is."""

    token_ids: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each row, the newest included."""
    table_rows: list[int] = field(default_factory=list)
    """Where each row's blocks are listed; rows of one sequence have one table row."""
    block_ids: list[Sequence[int]] = field(default_factory=list)
    """Each row's blocks, the last of which the newest token is written to."""

    def __len__(self) -> int:
        """How many."""
        return len(self.token_ids)

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        block_size: int,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> "DecodeRows":
        """A row for each sequence's last token, and behind it one for each drafted token.

        Args:
            requests: running sequences.
            block_size: tokens of a block.
            drafts: what each sequence is expected to say; None: nothing.
        """
        rows = cls()
        for request, draft in zip(requests, drafts or [()] * len(requests), strict=True):
            for length, token_id in enumerate((request.token_ids[-1], *draft), request.num_tokens):
                rows.token_ids.append(token_id)
                rows.lengths.append(length)
                rows.table_rows.append(request.table_row)
                rows.block_ids.append(request.block_ids[: -(-length // block_size)])
        return rows
