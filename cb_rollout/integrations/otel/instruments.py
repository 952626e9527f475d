"""Metrics of engines as OpenTelemetry instruments.

Owns their names: those of the GenAI semantic conventions, those of transformers' continuous
batching if the meaning is the same, and `cb_rollout.*`, which `/metrics` exports under Prometheus
names.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from typing import Any

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from cb_rollout.engine.request import Request
from cb_rollout.metrics import observer as observation
from cb_rollout.metrics.observer import ObservedStep, StatusSource
from cb_rollout.metrics.registry import (
    BUCKETS,
    DISTRIBUTIONS,
    Distribution,
    EngineCounters,
    EngineStatus,
)
from cb_rollout.types import RequestStatus

PREFIX = "cb_rollout."
PROVIDER = "cb_rollout"
OPERATION = "text_completion"

# Names of the GenAI semantic conventions (1.41), which a test compares with their package.
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
REQUEST_DURATION = "gen_ai.server.request.duration"
TOKEN_USAGE = "gen_ai.client.token.usage"

# Buckets that the conventions recommend.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
OUTPUT_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
DURATION_BUCKETS = tuple(0.01 * 2**power for power in range(14))
POWERS_OF_FOUR = tuple(4**power for power in range(14))

# Buckets of transformers' instruments, in milliseconds and percent (transformers 5.0).
TTFT_BUCKETS = (10, 25, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000, 10000)
LATENCY_BUCKETS = (50, 100, 250, 500, 1000, 2000, 5000, 10000, 20000, 30000, 60000)
FILL_BUCKETS = (5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 100)

MILLISECONDS = 1000.0


def _waiting(engine: StatusSource) -> int:
    return engine.status().requests_waiting


def _active(engine: StatusSource) -> int:
    return engine.status().requests_running


def _used_bytes(engine: StatusSource) -> int:
    return engine.status().kv_blocks_used * engine.bytes_per_block


def _free_bytes(engine: StatusSource) -> int:
    status = engine.status()
    return (status.kv_blocks - status.kv_blocks_used) * engine.bytes_per_block


# Gauges of transformers: name, unit, meaning, reading.
REFERENCE_GAUGES = (
    ("active_requests_count", "requests", "Sequences that hold memory now.", _active),
    ("waiting_requests_count", "requests", "Sequences that wait for blocks or a place.", _waiting),
    ("kv_cache_memory_bytes", "bytes", "Bytes of the KV blocks in use.", _used_bytes),
    ("kv_cache_free_memory_bytes", "bytes", "Bytes of the planned blocks not in use.", _free_bytes),
)


def model_attributes(model_name: str) -> dict[str, Any]:
    """Return the attributes that the GenAI conventions require of a metric and a span."""
    attributes = {"gen_ai.operation.name": OPERATION, "gen_ai.provider.name": PROVIDER}
    if model_name:
        attributes["gen_ai.request.model"] = model_name
    return attributes


class Instruments:
    """The instruments of one meter; gauges report while `is_on()` is true."""

    def __init__(self, meter: Meter, is_on: Callable[[], bool]) -> None:
        self._is_on = is_on
        self._distributions: dict[Distribution, Histogram] = {}
        for distribution in DISTRIBUTIONS:
            self._distributions[distribution] = meter.create_histogram(
                f"{PREFIX}{distribution.name.removesuffix('_seconds')}",
                unit="s",
                description=distribution.help,
                explicit_bucket_boundaries_advisory=BUCKETS,
            )
        self._counters = {
            entry.name: meter.create_counter(
                f"{PREFIX}{entry.name}", description=entry.metadata["help"]
            )
            for entry in fields(EngineCounters)
            if entry.metadata
        }
        self._create_gauges(meter)
        self._create_of_requests(meter)
        self._create_of_steps(meter)

    def _create_gauges(self, meter: Meter) -> None:
        for entry in fields(EngineStatus):
            read = partial(_field_of_status, entry.name)
            # Versions of several engines have no sum.
            combine = max if entry.name == "policy_version" else sum
            callback = partial(self._observed, read, combine)
            meter.create_observable_gauge(
                f"{PREFIX}{entry.name}", [callback], description=entry.metadata["help"]
            )
        for name, unit, meaning, read in REFERENCE_GAUGES:
            callback = partial(self._observed, read, sum)
            meter.create_observable_gauge(name, [callback], unit=unit, description=meaning)

    def _create_of_requests(self, meter: Meter) -> None:
        create = meter.create_histogram
        self._time_to_first_token = create(
            TIME_TO_FIRST_TOKEN,
            unit="s",
            description="From submission to the first token.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_BUCKETS,
        )
        self._time_per_output_token = create(
            TIME_PER_OUTPUT_TOKEN,
            unit="s",
            description="Mean over the tokens after the first, of each finished sequence.",
            explicit_bucket_boundaries_advisory=OUTPUT_TOKEN_BUCKETS,
        )
        self._request_duration = create(
            REQUEST_DURATION,
            unit="s",
            description="From submission to the end.",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS,
        )
        self._token_usage = create(
            TOKEN_USAGE,
            unit="{token}",
            description="Tokens of a sequence: of its prompt, and sampled.",
            explicit_bucket_boundaries_advisory=POWERS_OF_FOUR,
        )
        self._ttft_milliseconds = create(
            "ttft_milliseconds",
            unit="ms",
            description="From submission to the first token, in milliseconds.",
            explicit_bucket_boundaries_advisory=TTFT_BUCKETS,
        )
        self._latency_milliseconds = create(
            "request_latency_milliseconds",
            unit="ms",
            description="From submission to the end of finished sequences, in milliseconds.",
            explicit_bucket_boundaries_advisory=LATENCY_BUCKETS,
        )

    def _create_of_steps(self, meter: Meter) -> None:
        self._batch_size = meter.create_histogram(
            f"{PREFIX}batch_size",
            description="Rows of a forward: prompts, each once for its group, or sequences.",
            explicit_bucket_boundaries_advisory=POWERS_OF_FOUR,
        )
        self._batch_blocks = meter.create_histogram(
            f"{PREFIX}batch_kv_blocks",
            description="KV blocks in use after a forward.",
            explicit_bucket_boundaries_advisory=POWERS_OF_FOUR,
        )
        self._batch_fill = meter.create_histogram(
            "batch_fill_percentage",
            unit="percent",
            description="Tokens of a forward, in percent of max_batch_tokens.",
            explicit_bucket_boundaries_advisory=FILL_BUCKETS,
        )
        self._prefill_tokens = meter.create_counter(
            "prefill_tokens_processed", unit="tokens", description="Prompt tokens computed."
        )
        self._decode_tokens = meter.create_counter(
            "decode_tokens_processed", unit="tokens", description="Tokens of decode steps."
        )

    def _observed(
        self,
        read: Callable[[StatusSource], float],
        combine: Callable[[Iterable[float]], float],
        _: CallbackOptions,
    ) -> list[Observation]:
        engines = observation.engines()
        if not (engines and self._is_on()):
            return []
        return [Observation(combine(read(engine) for engine in engines))]

    def recorded(self, distribution: Distribution, seconds: float) -> None:
        self._distributions[distribution].record(seconds)

    def stepped(self, step: ObservedStep) -> None:
        for name, counter in self._counters.items():
            if added := getattr(step.added, name):
                counter.add(added)
        attributes = {f"{PREFIX}step": "prefill" if step.is_prefill else "decode"}
        num_tokens = step.added.prefill_tokens if step.is_prefill else step.added.rows_computed
        self._batch_size.record(step.added.rows_computed, attributes)
        self._batch_blocks.record(step.num_blocks_used, attributes)
        self._batch_fill.record(100.0 * num_tokens / step.max_batch_tokens)
        processed = self._prefill_tokens if step.is_prefill else self._decode_tokens
        processed.add(num_tokens)

    def started(self, request: Request, model_name: str, within: Context | None) -> None:
        """Record the first token of a sequence."""
        assert request.first_token_time is not None
        seconds = request.first_token_time - request.created_time
        self._time_to_first_token.record(seconds, model_attributes(model_name), within)
        self._ttft_milliseconds.record(MILLISECONDS * seconds, context=within)

    def ended(
        self, request: Request, model_name: str, ended: float, within: Context, error: str | None
    ) -> None:
        """Record a sequence that ended.

        Args:
            request: the sequence.
            model_name: name of the model that sampled it.
            ended: when it ended, by `time.perf_counter()`.
            within: context of its span, for exemplars.
            error: the type of its error; None: it has none.
        """
        attributes = model_attributes(model_name)
        seconds = ended - request.created_time
        failed = {} if error is None else {"error.type": error}
        self._request_duration.record(seconds, attributes | failed, within)
        num_tokens = {"input": len(request.prompt_ids), "output": request.num_generated}
        for kind, number in num_tokens.items():
            self._token_usage.record(number, attributes | {"gen_ai.token.type": kind}, within)
        if request.status is not RequestStatus.FINISHED:
            return
        self._latency_milliseconds.record(MILLISECONDS * seconds, context=within)
        if request.num_generated > 1 and request.first_token_time is not None:
            each = (ended - request.first_token_time) / (request.num_generated - 1)
            self._time_per_output_token.record(each, attributes, within)


def _field_of_status(name: str, engine: StatusSource) -> int:
    return getattr(engine.status(), name)
