"""Time inside the engine: the workloads `profile` and `bookkeeping`.

`profile` splits the long-tailed rollout, warmed up: coarsely by wrapping functions of the engine,
finely by the own time of every operator in torch.profiler. `bookkeeping` times the part of a decode
step that is neither forward nor sampling. The only module of the bench that names the engine's
inner functions; one that is gone raises AttributeError.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch

import cb_rollout
from benchmarks.harness.contenders import Contender, ours
from benchmarks.harness.workload import long_tailed
from benchmarks.sizes import Setup
from cb_rollout.engine.attention.cpu import linear
from cb_rollout.engine.attention.cpu.backend import CpuPagedAttention
from cb_rollout.engine.core import Engine
from cb_rollout.engine.executor import StepExecutor
from cb_rollout.engine.kv_cache.paged import PagedLayer
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.sampler import TokenSampler
from cb_rollout.engine.service.loop import EngineLoop
from cb_rollout.tools.bench import SEED, Workload, create_model, synchronize, timed

# Names of the wrapped functions that were running, outermost first.
CallPath = tuple[str, ...]

STEP, PREFILL, DECODE, FORWARD = "step", "prefill", "decode", "forward"
ATTENTION, LINEAR = "attention", "linear"
SAMPLING, DELIVERY = "sampling", "delivery"


class WrappedFunction(NamedTuple):
    """A function whose time is measured, under a name that several may share."""

    name: str
    owner: Any
    """A class or a module."""
    function: str


# The rest of a step is bookkeeping.
COARSE = (
    WrappedFunction(FORWARD, ModelRunner, "logits"),
    WrappedFunction(SAMPLING, TokenSampler, "extend"),
)

FINE = (
    *COARSE,
    WrappedFunction(STEP, Engine, "step"),
    WrappedFunction(PREFILL, StepExecutor, "prefill"),
    WrappedFunction(DECODE, StepExecutor, "decode"),
    WrappedFunction(ATTENTION, CpuPagedAttention, "attend"),
    WrappedFunction(ATTENTION, PagedLayer, "update"),
    WrappedFunction(LINEAR, torch.nn.functional, "linear"),
    WrappedFunction(LINEAR, linear, "multiply"),
    WrappedFunction(LINEAR, linear, "multiply_many"),
    WrappedFunction(DELIVERY, EngineLoop, "_deliver"),
)

OUTSIDE = "input processing, collecting, sync"

# Rows of the table, each with the function whose calls it counts; None: time outside of all.
ROWS = {
    "prefill forwards": FORWARD,
    "decode forwards: attention and its keys": ATTENTION,
    "decode forwards: linear layers": LINEAR,
    "decode forwards: other operations": FORWARD,
    "sampling": SAMPLING,
    "bookkeeping": STEP,
    "delivery": DELIVERY,
    OUTSIDE: None,
}

DECODE_ROWS = {name: row for row, name in ROWS.items() if row.startswith("decode")}

# Each operator after these takes less than a percent.
NUM_OPERATORS = 25

# More tokens than there are steps, so that no sequence of `bookkeeping` ends.
MAX_NEW_TOKENS = 400


@dataclass
class Spans:
    """Exclusive time and calls of wrapped functions.

    Time inside a nested wrapped function counts for that function only.
    """

    synchronize: Callable[[], None]
    """Wait for the device, so that its work counts for the function that started it."""
    seconds: dict[CallPath, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[CallPath, int] = field(default_factory=lambda: defaultdict(int))
    _path: CallPath = ()
    _entered: float = 0.0

    def clear(self) -> None:
        """Reset times and calls."""
        self.seconds.clear()
        self.calls.clear()

    def within(self, *names: str) -> float:
        """Return the seconds inside any of these functions, nested calls included."""
        return sum(s for path, s in self.seconds.items() if any(name in path for name in names))

    def _switch(self, path: CallPath) -> None:
        self.synchronize()
        now = time.perf_counter()
        if self._path:
            self.seconds[self._path] += now - self._entered
        self._path, self._entered = path, now

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            outer = self._path
            self._switch((*outer, name))
            self.calls[self._path] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(outer)

        return run


@contextmanager
def wrapped(
    functions: Sequence[WrappedFunction], synchronize: Callable[[], None] = lambda: None
) -> Iterator[Spans]:
    """Measure these functions inside; only one thread at a time may call them."""
    spans = Spans(synchronize)
    originals = [(x, getattr(x.owner, x.function)) for x in functions]
    for x, original in originals:
        setattr(x.owner, x.function, spans._wrapped(x.name, original))
    try:
        yield spans
    finally:
        for x, original in originals:
            setattr(x.owner, x.function, original)


def bench_profile(setup: Setup) -> dict[str, Any]:
    """Return seconds, percent and calls of each part of a rollout and of each operator."""
    model, workload = create_model(setup.sizes.shape, setup.device), long_tailed(setup.sizes)
    # Functions inside a CUDA graph cannot be told apart.
    contender = ours(**{} if setup.device == "cpu" else {"use_cuda_graph": False})
    seconds, parts = _parts(contender, model, workload, setup.repetitions)
    return {
        "rollout": {"seconds, unwatched": seconds, "tokens": workload.num_tokens},
        "where the time goes": parts,
        "operators": _operators(contender, model, workload),
    }


def _row_of(path: CallPath) -> str:
    if DELIVERY in path:
        return "delivery"
    if SAMPLING in path:
        return "sampling"
    if FORWARD not in path:
        return "bookkeeping"
    if DECODE not in path:
        return "prefill forwards"
    return DECODE_ROWS[path[-1]]


def _parts(
    contender: Contender, model: Any, workload: Workload, repetitions: int
) -> tuple[float, dict[str, Any]]:
    """Return the seconds of a rollout that is not wrapped, and the parts of one that is."""
    plain_total = wrapped_total = 0.0
    seconds, calls = dict.fromkeys(ROWS, 0.0), dict.fromkeys(ROWS, 0)
    with contender.create(model, workload) as run:
        run(workload)
        for _ in range(repetitions):
            plain_total += timed(lambda: run(workload))
            with wrapped(FINE, synchronize) as spans:
                wrapped_total += timed(lambda: run(workload))
            for path, spent in spans.seconds.items():
                row = _row_of(path)
                seconds[row] += spent
                calls[row] += spans.calls[path] if path[-1] == ROWS[row] else 0
    seconds[OUTSIDE] = wrapped_total - sum(seconds.values())
    return plain_total / repetitions, {
        row: {
            "seconds": seconds[row] / repetitions,
            "percent": 100 * seconds[row] / wrapped_total,
            "calls": calls[row] // repetitions,
        }
        for row in ROWS
    }


def _operators(contender: Contender, model: Any, workload: Workload) -> dict[str, Any]:
    """Return every operator's own time in one rollout, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    is_on_gpu = model.device.type == "cuda"
    if is_on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with contender.create(model, workload) as run:
        run(workload)
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            run(workload)
            synchronize()
    own = "self_device_time_total" if is_on_gpu else "self_cpu_time_total"
    found = sorted(profiler.key_averages(), key=lambda event: -getattr(event, own))
    total = sum(getattr(event, own) for event in found)
    shown = {e.key: (getattr(e, own), e.count) for e in found[:NUM_OPERATORS]}
    rest = found[NUM_OPERATORS:]
    if rest:
        shown["all others"] = sum(getattr(e, own) for e in rest), sum(e.count for e in rest)
    return {
        name: {"seconds": spent / 1e6, "percent": 100 * spent / total, "calls": count}
        for name, (spent, count) in shown.items()
    }


def bench_bookkeeping(setup: Setup) -> dict[str, Any]:
    """Return milliseconds of a decode step, and its percentage of bookkeeping.

    The step is the loop's, with its delivery and the hooks of an observer; the last one is exported
    by OpenTelemetry, into memory.
    """
    results = {f"{count} waiting": _decode_steps(setup, count) for count in setup.sizes.num_waiting}
    least = min(setup.sizes.num_waiting)
    with _exporting():
        results[f"{least} waiting, exported"] = _decode_steps(setup, least)
    return results


@contextmanager
def _exporting() -> Iterator[None]:
    # Only this workload needs the extra otel.
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    from cb_rollout.integrations import otel

    otel.instrument(TracerProvider(), MeterProvider([InMemoryMetricReader()]))
    try:
        yield
    finally:
        otel.uninstrument()


def _decode_steps(setup: Setup, num_waiting: int) -> dict[str, float]:
    num_rows = setup.sizes.bookkeeping_rows
    engine, running = _decoding_engine(setup, num_rows, num_waiting)
    loop = EngineLoop(engine)
    totals, shares = [], []
    with wrapped(COARSE, synchronize) as spans:
        for _ in range(10 * setup.repetitions):
            spans.clear()
            totals.append(timed(loop.step))
            shares.append(1 - spans.within(FORWARD, SAMPLING) / totals[-1])
    loop.require_alive()
    assert not any(request.status.is_final for request in running), "a sequence ended meanwhile"
    engine.abandon()
    return {
        "step_milliseconds": 1000 * statistics.median(totals),
        "bookkeeping_percent": 100 * statistics.median(shares),
    }


def _decoding_engine(setup: Setup, num_rows: int, num_waiting: int) -> tuple[Any, list[Any]]:
    """Return an engine with `num_rows` sequences that decode, and these sequences."""
    model = create_model(setup.sizes.shape, setup.device)
    config = cb_rollout.RolloutConfig(seed=SEED, max_requests_per_batch=num_rows)
    engine = Engine(model, config)
    params = cb_rollout.SamplingParams(ignore_eos=True, max_new_tokens=MAX_NEW_TOKENS)
    count, vocab_size = num_rows + num_waiting, model.config.vocab_size
    prompts = [[2 + i % (vocab_size - 2), 2 + i // (vocab_size - 2)] for i in range(count)]
    requests = [
        Request(
            request_id=str(number),
            prompt_ids=prompt,
            params=params,
            max_new_tokens=MAX_NEW_TOKENS,
            stop_tokens=frozenset(),
            seed=number,
        )
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    running = requests[:num_rows]
    while not all(request.num_generated for request in running):
        engine.step()
    return engine, running
