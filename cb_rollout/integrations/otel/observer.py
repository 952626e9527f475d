"""Spans of requests, rollouts and trainers' steps, and the switch that turns them on.

A sequence's spans are made when it ends, from the times that the engine records anyway. Their
parent is the span in which the caller submitted the sequence, perhaps on a different thread from
the one that steps the engine. No text of a prompt or an answer is exported.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import zip_longest
from typing import Any, TypeVar

from opentelemetry import context, metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from cb_rollout import __version__
from cb_rollout.engine.request import Request
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.otel.instruments import PREFIX, Instruments, model_attributes
from cb_rollout.metrics import observer as observation
from cb_rollout.metrics.observer import NOBODY, UNOBSERVED, ObservedSpan, ObservedStep, Observer
from cb_rollout.metrics.registry import Distribution
from cb_rollout.types import RequestStatus

_LOGGER = logging.getLogger(__name__)

SCOPE = "cb_rollout"

# Attributes for which the GenAI conventions have a name.
GENAI_NAMES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "generated_tokens": "gen_ai.usage.output_tokens",
    "tool": "gen_ai.tool.name",
}

# Offsets below this are ignored: two readings of the clocks differ by less, and a step of the
# system's clock is longer.
MAX_CLOCK_ERROR_NS = 1_000_000

Method = TypeVar("Method", bound=Callable[..., Any])


def instrument(tracer_provider: Any = None, meter_provider: Any = None) -> None:
    """Export spans and metrics of this process's engines and trainers, until `uninstrument()`.

    A later call replaces the earlier one, with its own providers.

    Args:
        tracer_provider: of the OpenTelemetry SDK; None: the global one, which may be set later.
        meter_provider: likewise.

    Raises:
        ConfigurationError: an argument is no such provider.
    """
    given = (
        ("tracer_provider", tracer_provider, "get_tracer"),
        ("meter_provider", meter_provider, "get_meter"),
    )
    for name, provider, method in given:
        if provider is not None and not hasattr(provider, method):
            raise ConfigurationError(
                f"{name} is a {type(provider).__name__}, which has no {method}(); pass one of "
                "opentelemetry.sdk, or None for the global one."
            )
    observation.observe_with(OtelObserver(tracer_provider, meter_provider))


def uninstrument() -> None:
    """Stop observing; providers keep running, and keep the data that they have not sent yet."""
    observation.observe_with(NOBODY)


class Clock:
    """Convert `time.perf_counter` to the nanoseconds of `time.time`."""

    def __init__(self) -> None:
        self._shift = time.time_ns() - time.perf_counter_ns()

    def follow(self) -> None:
        """Follow the system clock if it was set or runs at a different rate."""
        shift = time.time_ns() - time.perf_counter_ns()
        if abs(shift - self._shift) > MAX_CLOCK_ERROR_NS:
            self._shift = shift

    def ns(self, seconds: float) -> int:
        return self._shift + int(seconds * 1e9)

    def now(self) -> int:
        return self._shift + time.perf_counter_ns()


def _harmless(method: Method) -> Method:
    """Stop observing if a method raises, as a user's span processor may; return None."""

    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except Exception:
            _LOGGER.warning("OpenTelemetry raised; nothing more is exported", exc_info=True)
            uninstrument()
            return None

    return call  # type: ignore[return-value]


class OtelSpan(ObservedSpan):
    """A started span; used on one thread at a time."""

    def __init__(self, tracer: Tracer, clock: Clock, name: str, attributes: Any) -> None:
        self._tracer = tracer
        self._clock = clock
        clock.follow()
        self._span = tracer.start_span(name, attributes=attributes, start_time=clock.now())
        self._is_entered = False
        self._has_ended = False

    @_harmless
    def set(self, **attributes: Any) -> None:
        self._span.set_attributes(named(attributes))

    @_harmless
    def add(self, name: str, began: float, ended: float) -> None:
        parent = trace.set_span_in_context(self._span)
        part = self._tracer.start_span(name, parent, start_time=self._clock.ns(began))
        part.end(self._clock.ns(ended))

    @contextmanager
    def within(self) -> Iterator[None]:
        # Already entered, or over: observed spans keep their parent.
        if self._is_entered or self._has_ended:
            yield
            return
        self._is_entered = True
        token = context.attach(trace.set_span_in_context(self._span))
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        finally:
            self._is_entered = False
            context.detach(token)

    @_harmless
    def end(self, error: BaseException | None = None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if error is not None:
            set_failed(self._span, error, f"{type(error).__name__}: {error}")
        self._span.end(self._clock.now())


class OtelObserver(Observer):
    """Report to a tracer and a meter of OpenTelemetry; thread-safe."""

    is_observing = True

    def __init__(self, tracer_provider: Any, meter_provider: Any) -> None:
        self._tracer = trace.get_tracer(SCOPE, __version__, tracer_provider)
        meter = metrics.get_meter(SCOPE, __version__, meter_provider)
        self._clock = Clock()
        self._instruments = Instruments(meter, lambda: observation.observer() is self)

    @_harmless
    def submitted(self, requests: Sequence[Request]) -> None:
        current = context.get_current()
        for request in requests:
            request.observed = current

    @_harmless
    def stepped(self, step: ObservedStep) -> None:
        self._instruments.stepped(step)
        for request in step.started:
            self._instruments.started(request, step.model_name, request.observed)

    @_harmless
    def recorded(self, distribution: Distribution, seconds: float) -> None:
        self._instruments.recorded(distribution, seconds)

    @_harmless
    def ended(
        self, request: Request, model_name: str, ended: float, error: BaseException | None = None
    ) -> None:
        # A sequence that was submitted before `instrument()` begins a trace.
        parent = Context() if request.observed is None else request.observed
        request.observed = None
        remote = trace.get_current_span(parent).get_span_context().is_remote
        span = self._tracer.start_span(
            "request",
            parent,
            SpanKind.SERVER if remote else SpanKind.INTERNAL,
            attributes=model_attributes(model_name),
            start_time=self._clock.ns(request.created_time),
        )
        within = trace.set_span_in_context(span, parent)
        cause = request.cause if error is None else error
        error_type = None
        if error is not None or request.status is RequestStatus.FAILED:
            error_type = "_OTHER" if cause is None else type(cause).__name__
        if span.is_recording():
            span.set_attributes(request_attributes(request))
            if error_type is not None:
                set_failed(span, cause, request.error or str(error), error_type)
            self._add_phases(request, within, ended)
            reason = str(request.finish_reason or "error")
            finished = {"gen_ai.response.finish_reasons": [reason]}
            span.add_event("finished", finished, self._clock.ns(ended))
        span.end(self._clock.ns(ended))
        self._instruments.ended(request, model_name, ended, within, error_type)

    def _add_phases(self, request: Request, within: Context, ended: float) -> None:
        created = request.created_time
        admitted = request.admitted_time
        first = request.first_token_time
        self._add("queued", within, created, ended if admitted is None else admitted)
        if admitted is not None:
            self._add("prefill", within, admitted, ended if first is None else first)
        if first is not None:
            self._add("decode", within, first, ended)
        for (lost, reason), resumed in zip_longest(request.requeues, request.resumed_times):
            self._add(reason, within, lost, ended if resumed is None else resumed)

    def _add(self, name: str, within: Context, began: float, ended: float) -> None:
        span = self._tracer.start_span(name, within, start_time=self._clock.ns(began))
        span.end(self._clock.ns(ended))

    def begin(self, name: str, **attributes: Any) -> ObservedSpan:
        return self._begun(name, attributes) or UNOBSERVED

    @_harmless
    def _begun(self, name: str, attributes: Mapping[str, Any]) -> OtelSpan:
        return OtelSpan(self._tracer, self._clock, name, named(attributes))

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[ObservedSpan]:
        span = self.begin(name, **attributes)
        try:
            with span.within():
                yield span
        finally:
            span.end()

    @contextmanager
    def joined(self, headers: Mapping[str, str]) -> Iterator[None]:
        caller = self._context_of(headers)
        if caller is None:
            yield
            return
        token = context.attach(caller)
        try:
            yield
        finally:
            context.detach(token)

    @_harmless
    def _context_of(self, headers: Mapping[str, str]) -> Context | None:
        """Return the context that headers name; None if the process already has a span."""
        current = context.get_current()
        # The span of another instrumentation of the server, which has read the headers.
        if trace.get_current_span(current).get_span_context().is_valid:
            return None
        return propagate.extract(headers, current)


def named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes under their exported names."""
    return {GENAI_NAMES.get(name, f"{PREFIX}{name}"): value for name, value in attributes.items()}


def request_attributes(request: Request) -> dict[str, Any]:
    """Return a sequence's span attributes: ids, settings, tokens and policy versions."""
    params = request.params
    attributes = {
        f"{PREFIX}request_id": request.request_id,
        f"{PREFIX}preemptions": request.num_preemptions,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.seed": request.seed,
        "gen_ai.request.stream": request.is_streaming,
        "gen_ai.request.temperature": 0.0 if params.is_greedy else params.temperature,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
        "gen_ai.usage.output_tokens": request.num_generated,
    }
    if request.group is not None:
        # Numbers of served prompts have 128 bits.
        attributes[f"{PREFIX}group"] = str(request.group)
    if request.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [str(request.finish_reason)]
    versions = [version for version, _ in request.policy_versions]
    if versions:
        attributes[f"{PREFIX}policy_version"] = versions[-1]
        attributes[f"{PREFIX}policy_versions"] = versions
    return attributes


def set_failed(
    span: Span, error: BaseException | None, message: str, error_type: str | None = None
) -> None:
    """Mark a span as failed; `error_type` is the error's class by default."""
    span.set_status(Status(StatusCode.ERROR, message))
    span.set_attribute("error.type", error_type or type(error).__name__)
    if error is not None:
        span.record_exception(error)
