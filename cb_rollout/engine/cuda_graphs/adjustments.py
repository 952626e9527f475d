"""Hold what rows of a captured step add to their logits, and which tokens they hold, on the device.

A table has a row over the vocabulary for each request that needs one. It is allocated when the
first request does, and found by its address. Called by the thread that steps the engine.

R: rows of a table, V: vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request, distinct_params

# Rows that a table begins with; it doubles where more are needed.
NUM_FIRST_ROWS = 8

# Bits of a token's mark: the prompt holds it; it would end the sequence too early; and below them
# how often the completion holds it.
IN_PROMPT, IS_EARLY, MAX_COUNT = 1 << 14, 1 << 13, 8191


@dataclass(slots=True)
class AdjustmentTable:
    """Rows over the vocabulary."""

    dtype: torch.dtype
    max_rows: int
    """Most rows, as many as a step has."""
    may_be_needed: Callable[[SamplingParams], bool]
    """Return whether any request with these parameters needs a row."""
    is_needed: Callable[[Request], bool]
    """Return whether such a request needs one."""
    entries: Callable[[Request], Mapping[int, float]]
    """Return the numbers of a request's row by token id; others are 0."""
    counts_tokens: bool
    """True: a step changes a row by the token that it samples."""
    _table_RV: torch.Tensor | None = None
    _rows: dict[Request, int] = field(default_factory=dict)
    _states: dict[Request, list[int]] = field(default_factory=dict)

    @property
    def address(self) -> int:
        """Return the address of the first row; 0: no request needed one."""
        return 0 if self._table_RV is None else self._table_RV.data_ptr()

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the table holds."""
        return 0 if self._table_RV is None else self._table_RV.nbytes

    def most_bytes(self, vocab_size: int) -> int:
        """Return the bytes of a table of all rows."""
        return self.max_rows * vocab_size * self.dtype.itemsize

    def release(self) -> None:
        """Free the table; no row may be loaded that reads it."""
        self._table_RV = None
        self._rows, self._states = {}, {}

    def note_step(self) -> None:
        """Count a step, which counted one more token of each row."""
        if self.counts_tokens:
            for state in self._states.values():
                state[1] += 1

    def forget(self) -> None:
        """Write every row anew at the next use."""
        self._states.clear()

    def load(
        self, requests: Sequence[Request], vocab_size: int, device: torch.device
    ) -> Sequence[int]:
        """Write the rows of these requests; return each one's row plus 1, or 0 without a row."""
        needing: list[Request] = []
        if any(map(self.may_be_needed, distinct_params(requests))):
            needing = [r for r in requests if self.may_be_needed(r.params) and self.is_needed(r)]
        self._assign(needing, vocab_size, device)
        self._write([r for r in needing if self._states.get(r) != self._state(r)])
        if not needing:
            return [0] * len(requests)
        return [self._rows.get(request, -1) + 1 for request in requests]

    def _assign(self, needing: Collection[Request], vocab_size: int, device: torch.device) -> None:
        """Give each of these requests a row, and take back all others."""
        self._rows = {request: self._rows[request] for request in needing if request in self._rows}
        self._states = {r: self._states[r] for r in needing if r in self._states}
        shape = (0, vocab_size) if self._table_RV is None else tuple(self._table_RV.shape)
        size = max(shape[0], len(needing))
        free = iter(sorted(set(range(size)) - set(self._rows.values())))
        for request in needing:
            if request not in self._rows:
                self._rows[request] = next(free)
        if needing and (len(needing) > shape[0] or vocab_size != shape[1]):
            size = min(self.max_rows, max(NUM_FIRST_ROWS, 2 * shape[0], len(needing)))
            # The last one's memory may serve the next: the stream orders steps that read it before.
            self._table_RV = None
            self._table_RV = torch.zeros(size, vocab_size, dtype=self.dtype, device=device)
            self._states = {}

    def _state(self, request: Request) -> list[int]:
        """Return what a right row is told by: a preempted sequence may get other tokens."""
        return [request.num_preemptions, request.num_tokens] if self.counts_tokens else [0, 0]

    def _write(self, requests: Sequence[Request]) -> None:
        """Write these requests' rows anew."""
        if not requests or (table_RV := self._table_RV) is None:
            return
        device, vocab_size = table_RV.device, table_RV.shape[1]
        written = devices.to_device([self._rows[request] for request in requests], device)
        table_RV.index_fill_(0, written, 0)
        triples = [
            (self._rows[request], token, value)
            for request in requests
            for token, value in self.entries(request).items()
            if token < vocab_size
        ]
        rows, tokens, values = (list(column) for column in zip(*triples, strict=True))
        places = devices.to_device(rows, device), devices.to_device(tokens, device)
        table_RV.index_put_(places, devices.to_device(values, device, self.dtype))
        self._states |= {request: self._state(request) for request in requests}


def bias_table(max_rows: int, never_sampled: Collection[int]) -> AdjustmentTable:
    """Return a table of what is added to logits, float32, which also forbids tokens.

    `never_sampled`: token ids that no row samples unless its `logit_bias` names them.
    """

    def may_be_needed(params: SamplingParams) -> bool:
        return bool(params.logit_bias or params.bad_words)

    def entries(request: Request) -> Mapping[int, float]:
        bias = dict.fromkeys(never_sampled, -torch.inf) | dict(request.params.logit_bias or {})
        # Words of several tokens are no matter of a graph.
        return bias | {word[0]: -torch.inf for word in request.params.bad_words}

    return AdjustmentTable(
        torch.float32, max_rows, may_be_needed, lambda request: True, entries, counts_tokens=False
    )


def mark_table(max_rows: int) -> AdjustmentTable:
    """Return a table of marks, int16: what penalties and minimum lengths ask of each token."""

    def may_be_needed(params: SamplingParams) -> bool:
        return params.is_penalized or bool(params.min_new_tokens or params.min_length)

    def is_needed(request: Request) -> bool:
        is_early = bool(request.stop_tokens) and request.num_generated < request.min_generated
        return request.params.is_penalized or is_early

    def entries(request: Request) -> Mapping[int, float]:
        marks = dict.fromkeys(request.prompt_ids, IN_PROMPT)
        for token, count in Counter(request.token_ids[len(request.prompt_ids) :]).items():
            marks[token] = marks.get(token, 0) | min(count, MAX_COUNT)
        for token in request.stop_tokens:
            marks[token] = marks.get(token, 0) | IS_EARLY
        return marks

    return AdjustmentTable(
        torch.int16, max_rows, may_be_needed, is_needed, entries, counts_tokens=True
    )
