"""The workload `gpu_compiled`: kernels of a captured decode step, compiled and not.

The engine's own trace is compiled by inductor for a card that is not there, up to the code of its
kernels. They are counted, with the calls of operators between them, and take the place of the
model's own forward in the modelled step. A model, not a measurement: no device runs anything.

B: rows, V: vocabulary.
"""

from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from benchmarks.roofline.cards import Card
from benchmarks.roofline.gpu_model import ideal_decode, listed
from benchmarks.roofline.inductor_kernels import (
    GeneratedKernel,
    OperatorCall,
    Planned,
    Sized,
    planned_kernels,
)
from benchmarks.roofline.kernel_recorder import Kernel, KernelRecorder
from benchmarks.roofline.steps import (
    Rows,
    Shape,
    Step,
    engine_decode,
    engine_layout,
)
from benchmarks.roofline.tensors import DEVICE
from benchmarks.roofline.vllm_kernels import VERSION, vllm_step
from benchmarks.sizes import Setup
from cb_rollout.engine.attention.decode_cache import (
    AttentionSpec,
    DecodeCache,
    DecodeInputs,
    DecodeLayer,
)
from cb_rollout.engine.attention.traced_forward import Traceable, TracedForward, example, trace
from cb_rollout.engine.attention.triton.backend import TRACING
from cb_rollout.engine.model.precision import Precision
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.tools.bench import create_model
from cb_rollout.weights.replica import held_dtype, place
from cb_rollout.weights.tensor import weights_of

NOTE = "a model, not a measurement"

META = torch.device("meta")

# Of an H100, which decide what inductor fuses and how large its tiles are.
PROPERTIES = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    total_memory=80 << 30,
    gcnArchName="",
)

# Layers of the model that is planned, and those after which inductor's kernels repeat: it adds up
# to four results of a residual stream in the next kernel before it writes their sum.
PLANNED_LAYERS, PERIOD = 4, 2


class Form(NamedTuple):
    """Layout and dtypes of the weights of a compiled step."""

    is_copy: bool
    """True if neighbouring weights lie side by side, so that their products are joined."""
    is_autocast: bool = False
    """True for float32 weights under autocast to bfloat16, which TRL trains by default."""


# A form of None: the model's own forward, which is not compiled.
CONTENDERS: dict[str, Form | None] = {
    "the model's own forward": None,
    "compiled": Form(is_copy=False),
    "compiled, a copy's weights": Form(is_copy=True),
    "compiled, TRL's default precision": Form(is_copy=True, is_autocast=True),
}


def bench_gpu_compiled(setup: Setup) -> dict[str, Any]:
    """Return launches, bytes and modelled milliseconds of a decode step, compiled and not."""
    card, rows = listed(setup)
    rows = Rows(rows.num_rows, setup.sizes.compiled_tokens)
    results: dict[str, Any] = {}
    for name, shape in setup.sizes.modelled_shapes.items():
        key, contenders = tuple(shape.items()), {}
        for contender, form in CONTENDERS.items():
            plan = None if form is None else _plan(key, form)
            contenders[f"cb_rollout, {contender}"] = _figures(shape, rows, card, plan)
        theirs = vllm_step(shape, rows, is_decode=True)
        contenders[f"vLLM {VERSION}"] = _row(
            theirs.step, theirs.layer.num_launches, shape, rows, card
        )
        results[f"a decode step of {name}, {rows} tokens, on {card.name}, modelled"] = contenders
    return results


def _figures(shape: Shape, rows: Rows, card: Card, plan: "Plan | None") -> dict[str, float]:
    """Return the figures of a step of the engine."""

    def step(num_layers: int) -> Step:
        replace = None if plan is None else plan.forward
        return engine_decode(shape, rows, card.num_processors, num_layers, replace=replace)

    num_layers = shape["num_hidden_layers"]
    few, whole = step(PERIOD), step(num_layers)
    of_layers = whole.num_launches - few.num_launches
    a_layer = of_layers / (num_layers - PERIOD) if num_layers > PERIOD else 0
    return _row(whole, a_layer, shape, rows, card)


def _row(step: Step, a_layer: float, shape: Shape, rows: Rows, card: Card) -> dict[str, float]:
    seconds = card.step_seconds(step)
    return {
        "launches": step.num_launches,
        "launches_per_layer": a_layer,
        "gigabytes": step.num_bytes / 1e9,
        "milliseconds": 1e3 * seconds,
        "percent_of_roofline": 100 * ideal_decode(shape, rows).seconds(card) / seconds,
    }


class Plan(NamedTuple):
    """The kernels of a compiled forward, cut where its layers attend."""

    parts: list[Planned]
    """The kernels before the first attention; then those of each attention and after it."""
    calls: list[tuple[DecodeLayer, AttentionSpec]]
    vocab_size: int

    def of_layers(self, num_layers: int) -> Planned:
        """Return the kernels of a model of so many layers, a multiple of `PERIOD`."""
        assert num_layers % PERIOD == 0
        before, first, *repeated, last = self.parts
        middle = [one for part in repeated for one in part]
        return [*before, *first, *middle * (num_layers // PERIOD - 1), *last]

    def forward(self, recorder: KernelRecorder, num_layers: int) -> "PlannedForward":
        """Return the forward of a model of so many layers, which reports to a recorder."""
        return PlannedForward(self, num_layers, recorder)


class PlannedForward(TracedForward):
    """Report the kernels of a plan in place of running a compiled forward."""

    def __init__(self, plan: Plan, num_layers: int, recorder: KernelRecorder) -> None:
        super().__init__(TRACING)
        self._kernels, self._calls = plan.of_layers(num_layers), plan.calls
        self._vocab_size, self._recorder = plan.vocab_size, recorder

    def check_weights(self, model: torch.nn.Module) -> None:
        """Do nothing: a plan holds no weights."""

    def run(self, inputs: DecodeInputs, *, raises: bool = False) -> torch.Tensor:
        """Report the kernels of a step, and return logits without contents."""
        num_rows = inputs.tokens_B1.shape[0]
        for one in self._kernels:
            if isinstance(one, GeneratedKernel):
                num_bytes = one.fixed_bytes + num_rows * one.bytes_per_row
                self._recorder.kernels[Kernel(one.name, num_bytes, 0)] += 1
                continue
            arguments = tree_map(lambda value: _tensor(value, num_rows), one.arguments)
            if _is_attention(one):
                query, key, value, call = arguments
                layer, spec = self._calls[call]
                inputs.attend(layer, query, key, value, spec)
            else:
                one.operator(*arguments)
        return torch.empty(num_rows, self._vocab_size, dtype=torch.bfloat16, device=DEVICE)


def _tensor(value: Any, num_rows: int) -> Any:
    """Return a tensor without contents for a `Sized`, and any other value as it is."""
    if not isinstance(value, Sized):
        return value
    shape = value.shape(num_rows)
    return torch.empty_strided(shape, value.strides, dtype=value.dtype, device=DEVICE)


def _is_attention(one: GeneratedKernel | OperatorCall) -> bool:
    attend = torch.ops.cb_rollout.attend.default
    return isinstance(one, OperatorCall) and one.operator is attend


class _Autocast(TorchFunctionMode):
    """Cast what linear layers take to bfloat16; torch autocasts no tensors without contents."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            args = tree_map_only(torch.Tensor, lambda tensor: tensor.to(torch.bfloat16), args)
        return func(*args, **kwargs or {})


@cache
def _plan(key: tuple[tuple[str, Any], ...], form: Form) -> Plan:
    shape = dict(key)
    layout = engine_layout(shape, PLANNED_LAYERS)
    model = create_model(shape, "meta", num_hidden_layers=PLANNED_LAYERS).eval()
    precision = Precision(None, None)
    if form.is_autocast:
        model, precision = model.float(), Precision(torch.bfloat16, None)
    if form.is_copy:
        weights = weights_of(model, lambda tensor: tensor, partial(held_dtype, precision))
        place(model, weights, precision, META)
    runner, cache = ModelRunner(model, None), DecodeCache(layout, META)
    forward = Traceable(runner.decode, cache, [0, 1])
    with _Autocast() if form.is_autocast else nullcontext():
        traced = trace(forward, *example(TRACING.num_rows, [0, 1], META))
    TRACING.rewrite(traced.graph, traced.weights)
    planned = planned_kernels(traced.graph, PROPERTIES)
    parts: list[Planned] = [[]]
    for one in planned:
        if _is_attention(one):
            parts.append([])
        parts[-1].append(one)
    return Plan(parts, traced.calls, shape["vocab_size"])
