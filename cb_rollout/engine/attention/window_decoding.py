"""Decode steps of one model over a window of its running sequences.

B: rows, V: vocabulary.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cb_rollout._compat_hooks import has_hooks
from cb_rollout.engine.attention.decode_cache import DecodeCache
from cb_rollout.engine.attention.seam import Forward
from cb_rollout.engine.attention.trace import Trace, UntraceableError
from cb_rollout.engine.attention.window import COLUMNS_AT_A_TIME, KeyWindow
from cb_rollout.engine.attention.window_step import WindowStep
from cb_rollout.engine.block_table import BlockTable
from cb_rollout.engine.cache import PagedCache
from cb_rollout.engine.capture import captured_weights
from cb_rollout.engine.faults import is_out_of_memory
from cb_rollout.engine.probe import CacheLayout
from cb_rollout.errors import said

LEAST_BYTES = 16 << 20
# A window this small is never too large.

STEPS_BEFORE_TRACE = 64
# With the same weights: who takes fewer would wait for a trace longer than it saves.

MOST_TRACES = 3
# A model whose weights move at every sync is not worth one.

_LOGGER = logging.getLogger(__name__)


class WindowDecoding:
    """Runs decode steps with no gather, on a CPU."""

    def __init__(self, layout: CacheLayout) -> None:
        """Prepare for pages of this layout."""
        self.cache = DecodeCache(layout, torch.device("cpu"))
        self.trace: Trace | None = None
        """Runs the forward from a list; None: not yet, or the model itself runs."""
        self._bytes_per_token = layout.bytes_per_token
        self.is_recurrent = layout.is_recurrent
        """Whether the forward moves states, which no trace does."""
        self._num_traces = MOST_TRACES if layout.is_recurrent else 0
        self._num_steps = 0
        self._steps_before_trace = STEPS_BEFORE_TRACE
        self._inductor_options: Mapping[str, Any] | None = None
        self._weights: list[object] = []
        self._is_stepped_into = False
        self._order: list[int] = []
        """Which row of a step stands where, sequence by sequence as in the window."""
        self._slots_B = torch.empty(0)

    @property
    def can_trace(self) -> bool:
        """Whether the forward may still come to run from a list."""
        return self.trace is not None or self._num_traces < MOST_TRACES

    def compile_with(self, inductor_options: Mapping[str, Any]) -> None:
        """Have a trace made at once, and compiled."""
        self._inductor_options, self._steps_before_trace = inductor_options, 0

    def check_weights(self, model: torch.nn.Module) -> None:
        """Forget the trace if a weight no longer is where it was, or an adapter was switched.

        There is none while anyone steps into the forward, who would not be called.
        """
        if not self.can_trace:
            return
        weights, self._is_stepped_into = captured_weights(model), has_hooks(model)
        if self._is_stepped_into or weights != self._weights:
            self._weights, self.trace, self._num_steps = weights, None, 0

    def stay_untraced(self) -> None:
        """Have the model itself run, always."""
        self._num_traces, self.trace = MOST_TRACES, None

    def logits(
        self,
        forward: Forward,
        new_tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        slots: Sequence[int],
        cache: PagedCache,
        table: BlockTable,
    ) -> torch.Tensor | None:
        """As `ModelRunner.logits`, for rows of one new token each; None: a window is too large.

        The rows of a draft are neighbours, in one slot, each one token longer than the last.
        """
        starts = [row for row, slot in enumerate(slots) if not row or slot != slots[row - 1]]
        seated, first_lengths = [slots[row] for row in starts], [lengths[row] for row in starts]
        longest = max(lengths)
        most_bytes = max(cache.window_bytes, LEAST_BYTES)
        num_columns = longest + COLUMNS_AT_A_TIME
        if len(seated) * num_columns * self._bytes_per_token > most_bytes or cache.is_packed:
            cache.window = None
            return None
        window = cache.window
        if not isinstance(window, KeyWindow) or window.num_bytes > most_bytes:
            window = cache.window = KeyWindow(cache, table)
        is_drafted = len(starts) < len(slots)
        if window.seat(seated, first_lengths, longest) or is_drafted:
            self._order = _window_order(slots, starts, window.slots)
            self._slots_B = torch.tensor([slots[row] for row in self._order])
        order, num_new = self._order, len(self._order) // len(starts)
        ordered_lengths = [lengths[row] for row in order]
        tokens_B1 = torch.tensor([new_tokens[row] for row in order])
        lengths_B = torch.tensor(ordered_lengths)
        positions_B1 = (lengths_B - 1)[:, None]
        slots_B = self._slots_B
        write_places_B = table.places(slots_B, positions_B1[:, 0])
        step = WindowStep(window, ordered_lengths, lengths_B, write_places_B, num_new)
        self._consider_trace(forward)
        logits_BV = self._traced(tokens_B1, positions_B1, step)
        if logits_BV is None:
            logits_BV = self.cache.run(forward, step, tokens_B1, positions_B1, slots_B, cache)
        window.advance(seated, first_lengths, num_new)
        if order == list(range(len(slots))):
            return logits_BV
        places = {row: place for place, row in enumerate(order)}
        places_B = torch.tensor([places[row] for row in range(len(slots))])
        return logits_BV.index_select(0, places_B)

    def _traced(
        self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, step: WindowStep
    ) -> torch.Tensor | None:
        """The logits by the trace; None: there is none, or it failed where the model may not."""
        if self.trace is None:
            return None
        try:
            return self.trace(tokens_B1, positions_B1, step)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _LOGGER.warning("a trace is given up after it failed: %s", said(error))
            self.stay_untraced()
            return None

    def _consider_trace(self, forward: Forward) -> None:
        """Make a trace once it is likely to pay."""
        self._num_steps += 1
        is_due = self._num_steps > self._steps_before_trace and self._num_traces < MOST_TRACES
        if self.trace or self._is_stepped_into or not is_due:
            return
        self._num_traces += 1
        try:
            self.trace = Trace(forward, self.cache, self._inductor_options)
        except Exception as error:  # noqa: BLE001  a trace fails no request, whatever is wrong
            # Where memory ran out, the model's own forward says so itself.
            is_answer = isinstance(error, UntraceableError)
            told = str(error) if is_answer else said(error)
            if self._inductor_options is not None:
                _LOGGER.warning("decode forwards are not compiled, as was asked: %s", told)
                self._inductor_options = None
                self._num_traces -= 1
                return
            self.stay_untraced()
            _LOGGER.log(
                logging.INFO if is_answer else logging.WARNING,
                "decode forwards run by the model itself, not from a list: %s",
                told,
            )


def _window_order(slots: Sequence[int], starts: Sequence[int], seated: Sequence[int]) -> list[int]:
    """Rows of a step in the order of the window, as many of each sequence.

    A sequence of fewer repeats its last, which writes the same once more.

    Args:
        slots: of the step's rows.
        starts: where each sequence's rows begin.
        seated: the window's slots.
    """
    ends = [*starts[1:], len(slots)]
    num_new = max(end - start for start, end in zip(starts, ends, strict=True))
    rows = {
        slots[start]: [min(start + index, end - 1) for index in range(num_new)]
        for start, end in zip(starts, ends, strict=True)
    }
    return [row for slot in seated for row in rows[slot]]
