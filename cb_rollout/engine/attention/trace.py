"""A decode forward written down once as a list of operators, and from then on run from that list.

Most of a small decode step on a CPU is not arithmetic but Python: modules, decorators, arguments
handed on. A trace runs the same operators on the same weights, or kernels that do what several of
them do, and leaves the rest out. It is made by running the model's own forward on tensors without
contents, so that what it does cannot depend on the tokens; a model whose forward asks for a number,
or does another thing for another number of rows, has no trace. Attention stays a call to the step's
reader, so a trace fits every length.

B: rows, V: vocabulary, H: query heads, D: size of a key, E: size of a value.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cb_rollout import _compat_tracing
from cb_rollout.engine.attention.cpp_layers import MOST_ROWS
from cb_rollout.engine.attention.decode_cache import DecodeCache, DecodeLayer
from cb_rollout.engine.attention.places import Form
from cb_rollout.engine.attention.seam import Forward
from cb_rollout.engine.attention.trace_compile import compile_stretches
from cb_rollout.engine.attention.trace_fusions import fuse
from cb_rollout.engine.attention.trace_passes import add_reader, reader_of, simplify, take_products
from cb_rollout.engine.attention.trace_programs import take_programs
from cb_rollout.errors import said

TRACED_ROWS, TRIED_ROWS = 3, (1, 3, 8, MOST_ROWS + 1)
# A number that is no other size of a model; and those that a trace is tried with.

LARGEST_DIFFERENCE = 1e-3
# Of the largest logit: a trace sums in another order, and does nothing else differently.


class UntraceableError(Exception):
    """A model's forward cannot be run from a list."""


class Trace:
    """Runs decode forwards of one model from a list of operators."""

    def __init__(
        self,
        forward: Forward,
        cache: DecodeCache,
        inductor_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Trace a forward.

        Args:
            forward: of the model, held in evaluation mode.
            cache: what it is given as its cache; no recurrent layers.
            inductor_options: what runs between two attentions is compiled with these; None: is not
                compiled.

        Raises:
            UntraceableError: it asks for contents, or depends on the number of rows, or the list
                does not do the same.
        """
        recorder = _Recorder()

        def traced(tokens_B1: torch.Tensor, positions_B1: torch.Tensor) -> torch.Tensor:
            return _run(forward, cache, recorder, tokens_B1, positions_B1)

        try:
            module, has_guards = _compat_tracing.traced(traced, *_example(TRACED_ROWS))
        except Exception as error:
            raise UntraceableError(said(error)) from error
        if has_guards:
            raise UntraceableError("its forward depends on the number of rows")
        take_products(module.graph)
        add_reader(module.graph)
        if inductor_options is not None:
            try:
                compile_stretches(module, inductor_options)
            except Exception as error:
                raise UntraceableError(f"it does not compile: {said(error)}") from error
            few = module
        else:
            fuse(module)
            few = _copied(module)
            take_programs(few, reader_of(few.graph), recorder.calls, has_products=True)
            take_programs(module, reader_of(module.graph), recorder.calls, has_products=False)
        self._many = _List(module, recorder.calls)
        self._few = self._many if few is module else _List(few, recorder.calls)
        for num_rows in TRIED_ROWS:
            self._try(forward, cache, num_rows)

    def __call__(
        self, tokens_B1: torch.Tensor, positions_B1: torch.Tensor, reader: Any
    ) -> torch.Tensor:
        """float32 logits, `[B, V]`, as `Forward` with a cache that `reader` reads."""
        # Only operators run here: nothing can keep a tensor that remembers the mode.
        with torch.inference_mode():
            run = self._few if len(tokens_B1) <= MOST_ROWS else self._many
            return run(tokens_B1, positions_B1, reader)

    def _try(self, forward: Forward, cache: DecodeCache, num_rows: int) -> None:
        inputs = _example(num_rows)
        with torch.no_grad():
            expected_BV = _run(forward, cache, _StandIn(), *inputs)
        try:
            got_BV = self(*inputs, _StandIn())
        except Exception as error:
            raise UntraceableError(f"with {num_rows} rows: {said(error)}") from error
        allowed = LARGEST_DIFFERENCE * expected_BV.abs().max()
        if got_BV.shape != expected_BV.shape or not (got_BV - expected_BV).abs().max() <= allowed:
            raise UntraceableError(f"with {num_rows} rows it computes something else")


class _List:
    """Operators that run one after another."""

    def __init__(self, module: fx.GraphModule, calls: Sequence[Sequence[Any]]) -> None:
        """See `simplify`."""
        self._constants = simplify(module, calls)
        self.graph = module.graph
        """Its operators."""
        self._run = fx.GraphModule(torch.nn.Module(), module.graph).forward

    def __call__(self, *inputs: Any) -> torch.Tensor:
        return self._run(*inputs, *self._constants)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """With a graph of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def _run(
    forward: Forward, cache: DecodeCache, reader: Any, tokens: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    return cache.run(forward, reader, tokens, positions, tokens[:, 0])


def _example(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows_B1 = torch.arange(num_rows)[:, None]
    return rows_B1, rows_B1 + 1


class _Recorder:
    """Leaves a mark in the trace where a layer attends."""

    def __init__(self) -> None:
        self.calls: list[tuple[DecodeLayer, Form]] = []

    def attend(
        self,
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        form: Form,
    ) -> torch.Tensor:
        self.calls.append((layer, form))
        return _compat_tracing.mark(query, key, value, len(self.calls) - 1)


class _StandIn:
    """Attends to the new token alone, in a way that every input has a part in."""

    def attend(
        self,
        layer: DecodeLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        form: Form,
    ) -> torch.Tensor:
        times = query.shape[1] // key.shape[1]
        keys, values = (states.repeat_interleave(times, 1) for states in (key, value))
        scores = (query * keys).sum(-1, keepdim=True) * form.scale
        return (values * scores.sigmoid()).transpose(1, 2).contiguous()
