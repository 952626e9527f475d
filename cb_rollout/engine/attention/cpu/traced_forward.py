"""A model's decode forward, which runs by the model at first and by a trace once that pays.

Called by the thread that runs a decode step.

B: rows, V: vocabulary.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from cb_rollout.compat.torch import captured_weights, has_hooks
from cb_rollout.engine.attention.backend import Forward
from cb_rollout.engine.attention.cpu.trace import Trace, UntraceableError
from cb_rollout.engine.attention.decode_cache import DecodeCache, PagedAttention
from cb_rollout.engine.kv_cache.paged import PagedCache
from cb_rollout.engine.memory.device import is_out_of_memory
from cb_rollout.errors import said

# With the same weights. Tracing pays off after so many steps.
STEPS_BEFORE_TRACE = 64

# Tracing never pays off for a model whose weights move at every sync.
MOST_TRACES = 3

_LOGGER = logging.getLogger(__name__)


class TracedForward:
    """Runs decode forwards of one model: the model itself at first, then a trace of it."""

    def __init__(self, cache: DecodeCache, *, can_be_traced: bool) -> None:
        """Trace nothing yet.

        Args:
            cache: what the model is given as its cache.
            can_be_traced: whether the forward does nothing but operators on tensors that it is
                given; not where it moves recurrent states.
        """
        self.trace: Trace | None = None
        """The trace that runs the forward; None: the model itself runs."""
        self.can_be_traced = can_be_traced
        self._cache = cache
        self._num_traces = 0 if can_be_traced else MOST_TRACES
        self._num_steps = 0
        self._steps_before_trace = STEPS_BEFORE_TRACE
        self._inductor_options: Mapping[str, Any] | None = None
        self._weights: list[object] = []
        self._is_stepped_into = False

    @property
    def can_trace(self) -> bool:
        """Whether the forward has a trace, or may still get one."""
        return self.trace is not None or self._num_traces < MOST_TRACES

    def compile_with(self, inductor_options: Mapping[str, Any]) -> None:
        """Make a trace in the first step, and compile it."""
        self._inductor_options, self._steps_before_trace = inductor_options, 0

    def check_weights(self, model: torch.nn.Module) -> None:
        """Drop the trace if a weight has moved or an adapter was switched.

        There is no trace while a module has a forward hook, which a trace would not call.
        """
        if not self.can_trace:
            return
        weights, self._is_stepped_into = captured_weights(model), has_hooks(model)
        if self._is_stepped_into or weights != self._weights:
            self._weights, self.trace, self._num_steps = weights, None, 0

    def stay_untraced(self) -> None:
        """Run the model itself from now on."""
        self._num_traces, self.trace = MOST_TRACES, None

    def __call__(
        self,
        forward: Forward,
        attention: PagedAttention,
        tokens_B1: torch.Tensor,
        positions_B1: torch.Tensor,
        table_rows_B: torch.Tensor,
        cache: PagedCache,
    ) -> torch.Tensor:
        """Return float32 logits, `[B, V]`; the arguments are those of `DecodeCache.run`."""
        self._consider_trace(forward)
        if self.trace is not None:
            try:
                return self.trace(tokens_B1, positions_B1, attention)
            except Exception as error:
                # The model itself may succeed, but not where memory ran out.
                if is_out_of_memory(error):
                    raise
                _LOGGER.warning("a trace is given up after it failed: %s", said(error))
                self.stay_untraced()
        return self._cache.run(forward, attention, tokens_B1, positions_B1, table_rows_B, cache)

    def _consider_trace(self, forward: Forward) -> None:
        """Make a trace once it is likely to pay."""
        self._num_steps += 1
        is_due = self._num_steps > self._steps_before_trace and self._num_traces < MOST_TRACES
        if self.trace or self._is_stepped_into or not is_due:
            return
        self._num_traces += 1
        try:
            self.trace = Trace(forward, self._cache, self._inductor_options)
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
