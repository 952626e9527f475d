"""Find the record of each row of a trainer's batch by the row's tokens.

A user's trainer class may drop, sort, repeat or join rows after TRL has scored them, cut
completions, or train again on rows of earlier rollouts. Row ids that came with a batch are tried
first, and count only if the row has the record's tokens. Called by the trainer, on its thread.

B: rows of a batch, S: prompt and completion, T: tokens of a completion.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cb_rollout.engine.attention.shared_prefix import num_common
from cb_rollout.integrations.trl.rows.loss_rows import UNKNOWN_ID, LossBatch, LossRow

# One for each row of a batch; None: no record is suggested.
Suggestions = Sequence[LossRow | None]


class _Tokens(NamedTuple):
    """Tokens of a row of a batch."""

    prompt_ids: list[int]
    completion_ids: list[int]
    """As wide as the batch: padding at the end is included."""
    mask: list[int]
    """One for each completion token: 0 in the padding, and where the loss skips a token."""

    @property
    def num_completion_tokens(self) -> int:
        """Return the number of tokens up to the last that the mask keeps."""
        num_tokens = len(self.mask)
        while num_tokens and not self.mask[num_tokens - 1]:
            num_tokens -= 1
        return num_tokens

    def cut(self, record: LossRow) -> LossRow | None:
        """Return a record up to the first token that is not the row's; None: another row's record.

        It is another row's if the prompts differ, or if a token that the mask keeps differs.
        """
        if record.prompt_ids != self.prompt_ids:
            return None
        num_equal = num_common([record.completion_ids, self.completion_ids])
        if any(self.mask[num_equal:]):
            return None
        return record.cut(num_equal)


class _Rollout:
    """Records of one rollout."""

    def __init__(self, is_training: bool) -> None:
        self.is_training = is_training
        self.by_id: dict[int, LossRow] = {}
        self.by_prompt: dict[tuple[int, ...], list[LossRow]] = defaultdict(list)


class RowIndex:
    """Records of the rollout in progress, or of the last one, and of some before it."""

    def __init__(self, num_earlier: int) -> None:
        """Keep the records of `num_earlier` training rollouts before the latest rollout."""
        self.num_earlier = num_earlier
        self._latest = _Rollout(is_training=False)
        self._earlier: deque[_Rollout] = deque(maxlen=num_earlier)

    def begin_rollout(self, is_training: bool) -> None:
        if self._latest.is_training:
            self._earlier.appendleft(self._latest)
        self._latest = _Rollout(is_training)

    def add(self, rows: Iterable[LossRow]) -> None:
        """Add records of the rollout in progress; rows of unknown origin are left out."""
        for row in rows:
            if row.id != UNKNOWN_ID and self.with_id(row.id) is None:
                self._latest.by_id[row.id] = row
                self._latest.by_prompt[tuple(row.prompt_ids)].append(row)

    def with_id(self, row_id: int) -> LossRow | None:
        """Return the record of an id; None: it is not kept."""
        for rollout in (self._latest, *self._earlier):
            if row_id in rollout.by_id:
                return rollout.by_id[row_id]
        return None

    def with_tokens(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> LossRow | None:
        """Return the record of a sequence, cut to its length; None: none is kept."""
        tokens = _Tokens(list(prompt_ids), list(completion_ids), [1] * len(completion_ids))
        return self._matched(tokens, (), Counter())

    def rows_of(self, batch: LossBatch, suggested: Sequence[Suggestions]) -> list[LossRow]:
        """Return a record for each row of a batch.

        Args:
            batch: its token ids and mask, (B, S), are read.
            suggested: lists of records, the likeliest first. Lists whose length is not B, and
                records with other tokens, are ignored.

        Returns:
            Records cut to the tokens of their rows. Equal rows take different records as long as
            any are left, those of the latest rollout first. A row without a record gets one with
            the id `UNKNOWN_ID` and only the row's tokens.
        """
        rows = []
        num_taken: Counter[int] = Counter()
        for number, tokens in enumerate(_tokens_of(batch)):
            likely = [records[number] for records in suggested if len(records) == len(batch)]
            row = _first_with_tokens(tokens, likely)
            if row is None:
                row = self._matched(tokens, suggested, num_taken)
            if row is None:
                length = tokens.num_completion_tokens
                row = LossRow.unknown(tokens.prompt_ids, tokens.completion_ids[:length])
            num_taken[row.id] += 1
            rows.append(row)
        return rows

    def _matched(
        self, tokens: _Tokens, suggested: Sequence[Suggestions], num_taken: Counter[int]
    ) -> LossRow | None:
        """Return the record that shares most tokens with a row; of several, the least taken."""
        records: dict[int, LossRow] = {}
        for suggestions in suggested:
            for row in suggestions:
                if row is not None:
                    records[row.id] = row
        prompt = tuple(tokens.prompt_ids)
        for rollout in (self._latest, *self._earlier):
            for row in rollout.by_prompt.get(prompt, ()):
                records.setdefault(row.id, row)
        best: LossRow | None = None
        best_rank: tuple[bool, int, int] | None = None
        for record in records.values():
            row = tokens.cut(record)
            if row is None or row.id == UNKNOWN_ID:
                continue
            num_tokens = len(row.completion_ids)
            is_whole = len(record.completion_ids) == tokens.num_completion_tokens == num_tokens
            rank = is_whole, num_tokens, -num_taken[row.id]
            if best_rank is None or rank > best_rank:
                best = row
                best_rank = rank
        return best


def _first_with_tokens(tokens: _Tokens, records: Suggestions) -> LossRow | None:
    """Return the first record with a row's tokens, cut to them; None if no record has them."""
    for record in records:
        if record is None:
            continue
        row = tokens.cut(record)
        if row is not None:
            return row
    return None


def _tokens_of(batch: LossBatch) -> Iterable[_Tokens]:
    first = batch.input_ids.shape[1] - batch.logits_to_keep
    masks = batch.attention_mask.tolist()
    for ids, mask in zip(batch.input_ids.tolist(), masks, strict=True):
        num_prompt_tokens = sum(map(bool, mask[:first]))
        yield _Tokens(
            prompt_ids=ids[first - num_prompt_tokens : first],
            completion_ids=ids[first:],
            mask=mask[first:],
        )
