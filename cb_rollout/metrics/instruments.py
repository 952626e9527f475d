"""Every metric of an engine: its name, what it means, and where it is read. The one list of names.

Prometheus sees `cb_rollout_<name>` (counters with `_total`), OpenTelemetry `cb_rollout.<name>`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cb_rollout.engine.service.manager import ContinuousBatchingManager


class Kind(StrEnum):
    """How a figure moves."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Instrument:
    """A figure that can be read at any moment, from any thread."""

    name: str
    kind: Kind
    help: str
    read: Callable[[ContinuousBatchingManager], float]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds, one value for each thing that happened."""

    name: str
    help: str


def _total(name: str, help_text: str) -> Instrument:
    """One of the engine's running totals."""
    return Instrument(
        name, Kind.COUNTER, help_text, lambda manager: getattr(manager.counters, name)
    )


INSTRUMENTS = (
    _total("requests_finished", "Sequences that ended, well or not; cancelled ones left out."),
    _total("tokens_generated", "Sampled tokens."),
    _total("prefill_tokens", "Prompt tokens that went through a forward."),
    _total("prefill_tokens_saved", "Prompt tokens that a group or a known prefix had already."),
    _total("preemptions", "Sequences that gave up their memory to resume later."),
    _total("prefill_forwards", "Forwards of prompts."),
    _total("decode_forwards", "Forwards of running sequences."),
    _total("drafted_tokens", "Tokens that were guessed, and checked in a decode forward."),
    _total("accepted_tokens", "Guessed tokens that were sampled."),
    Instrument(
        "requests_running",
        Kind.GAUGE,
        "Sequences that hold memory now.",
        lambda manager: manager.status().requests_running,
    ),
    Instrument(
        "requests_waiting",
        Kind.GAUGE,
        "Sequences that wait for memory or a seat now.",
        lambda manager: manager.status().requests_waiting,
    ),
    Instrument(
        "kv_blocks_used",
        Kind.GAUGE,
        "KV cache blocks in use by unfinished sequences.",
        lambda manager: manager.status().kv_blocks_used,
    ),
    Instrument(
        "kv_blocks",
        Kind.GAUGE,
        "KV cache blocks that the plan allows.",
        lambda manager: manager.status().kv_blocks,
    ),
    Instrument(
        "kv_bytes",
        Kind.GAUGE,
        "Bytes held for keys, values and states now.",
        lambda manager: manager.status().kv_bytes,
    ),
    Instrument(
        "policy_version",
        Kind.GAUGE,
        "The version that tokens are stamped with.",
        lambda manager: manager.status().policy_version,
    ),
)

QUEUE = Distribution("queue_seconds", "From submission to the first seat, of each sequence.")
PREFILL = Distribution("prefill_seconds", "From the first seat to the first token.")
DECODE = Distribution("decode_seconds", "From the first token to the last.")
REQUEST = Distribution("request_seconds", "From submission to the end.")
PREFILL_STEP = Distribution("prefill_step_seconds", "One forward of prompts, with its sampling.")
DECODE_STEP = Distribution(
    "decode_step_seconds", "One forward of running sequences, with its sampling."
)
ROLLOUT = Distribution("rollout_seconds", "One generate_batch.")
SYNC = Distribution("sync_seconds", "One sync_weights.")
SLEEP = Distribution("sleep_seconds", "Giving the KV memory back, once.")

DISTRIBUTIONS = (
    QUEUE, PREFILL, DECODE, REQUEST, PREFILL_STEP, DECODE_STEP, ROLLOUT, SYNC, SLEEP,
)  # fmt: skip

DISTRIBUTION_OF_SPAN = {"rollout": ROLLOUT, "sync_weights": SYNC, "sleep": SLEEP}

BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
# Upper bounds in seconds: from one decode step on a GPU to the longest rollout.
