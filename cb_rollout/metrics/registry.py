"""Define an engine's counters, its state and its distributions, and the metrics of a rollout.

Prometheus sees `cb_rollout_<name>` (counters with `_total`). Loads no torch; the engine's thread
writes the counters. Fields with a help text are exported while the engine runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple


def _live(help_text: str, **options: Any) -> Any:
    return field(**options, metadata={"help": help_text})


_total = partial(_live, default=0)


@dataclass(slots=True)
class EngineCounters:
    """Running totals since the engine was made; the difference of two copies is one rollout's."""

    requests_finished: int = _total("Sequences that ended, well or not; cancelled ones left out.")
    tokens_generated: int = _total("Sampled tokens.")
    prefill_tokens: int = _total(
        "Tokens of prefills that went through a forward: prompts, and after a preemption what had "
        "been generated before it."
    )
    prefill_tokens_saved: int = _total(
        "Tokens of prefills that a group or a cached prefix had already."
    )
    preemptions: int = _total("Sequences preempted for want of KV blocks, to resume later.")
    offloaded_sequences: int = _total("Preempted sequences whose keys went to host memory.")
    restored_sequences: int = _total("Preempted sequences whose keys came back from host memory.")
    images_encoded: int = _total("Images that went through the vision tower.")
    prefill_forwards: int = _total("Forwards of prompts.")
    decode_forwards: int = _total("Forwards of running sequences.")
    rows_computed: int = 0
    """Rows of all forwards: prompts, each once for its group, and running sequences."""
    truncated_tokens: int = 0
    """Tokens sampled under top-k, top-p or min-p."""
    kept_tokens: int = 0
    """Candidates that truncation left, summed over `truncated_tokens`."""
    log_kept_mass: float = 0.0
    """Log-probability of these candidates, summed over `truncated_tokens`."""
    kv_blocks_peak: int = 0
    """Most blocks in use at once; a maximum, not a sum."""

    @property
    def num_forwards(self) -> int:
        return self.prefill_forwards + self.decode_forwards

    def plus(self, other: "EngineCounters") -> "EngineCounters":
        """Return the sum of two engines; peaks are summed too, though reached at other times."""
        total = EngineCounters()
        for counter in fields(self):
            value = getattr(self, counter.name) + getattr(other, counter.name)
            setattr(total, counter.name, value)
        return total

    def since(self, earlier: "EngineCounters") -> "EngineCounters":
        """Return the totals added after `earlier`, with the current peak."""
        added = EngineCounters()
        for counter in fields(self):
            value = getattr(self, counter.name) - getattr(earlier, counter.name)
            setattr(added, counter.name, value)
        added.kv_blocks_peak = self.kv_blocks_peak
        return added

    def copy(self) -> "EngineCounters":
        return replace(self)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of an engine at one moment."""

    requests_running: int = _live("Sequences that hold memory now.")
    requests_waiting: int = _live("Sequences that wait for KV blocks or a place in the batch now.")
    kv_blocks_used: int = _live("KV cache blocks in use by unfinished sequences.")
    kv_blocks: int = _live("KV cache blocks that the plan allows.")
    kv_bytes: int = _live("Bytes held for keys, values and states now.")
    policy_version: int = _live("The version that tokens are stamped with.")
    host_kv_bytes: int = _live(
        "Bytes of host memory held for keys of preempted sequences now.", default=0
    )


class Distribution(NamedTuple):
    """Metric in seconds with one value for each event."""

    name: str
    help: str


QUEUE = Distribution("queue_seconds", "From submission to admission, of each sequence.")
PREFILL = Distribution("prefill_seconds", "From admission to the first token.")
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

# Upper bounds in seconds: from one decode step on a GPU to the longest rollout.
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip

# Counters that are logged under their own names.
_LOGGED_COUNTERS = (
    "prefill_tokens", "prefill_tokens_saved", "images_encoded", "preemptions",
    "offloaded_sequences", "restored_sequences", "kv_blocks_peak",
)  # fmt: skip

# Metrics that are added up over several rollouts.
_SUMMED = (
    "rollout/seconds", "rollout/tokens", "rollout/prefill_tokens", "rollout/preemptions",
    "rollout/prefill_tokens_saved", "rollout/images_encoded",
    "rollout/offloaded_sequences", "rollout/restored_sequences",
)  # fmt: skip

# Metrics that are averaged over the tokens of several rollouts. All others take the largest value.
_AVERAGED = ("rollout/log_kept_mass", "rollout/kept_tokens")


def rollout_metrics(added: EngineCounters, seconds: float) -> dict[str, float]:
    """Return the metrics of one rollout by name, from its share of the counters and its seconds."""
    metrics = {f"rollout/{name}": getattr(added, name) for name in _LOGGED_COUNTERS}
    metrics["rollout/seconds"] = seconds
    metrics["rollout/tokens"] = added.tokens_generated
    metrics["rollout/tokens_per_second"] = added.tokens_generated / seconds if seconds else 0.0
    if added.truncated_tokens:
        metrics["rollout/log_kept_mass"] = added.log_kept_mass / added.truncated_tokens
        metrics["rollout/kept_tokens"] = added.kept_tokens / added.truncated_tokens
    return metrics


def combined_metrics(rollouts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of several rollouts, such as the turns of a conversation, by name."""
    combined: dict[str, float] = {}
    for name in dict.fromkeys(chain.from_iterable(rollouts)):
        with_metric = [metrics for metrics in rollouts if name in metrics]
        values = [metrics[name] for metrics in with_metric]
        if name in _SUMMED:
            combined[name] = sum(values)
        elif name in _AVERAGED:
            num_tokens = [metrics["rollout/tokens"] for metrics in with_metric]
            weighted = sum(value * num for value, num in zip(values, num_tokens, strict=True))
            combined[name] = weighted / sum(num_tokens)
        else:
            combined[name] = max(values)
    seconds = combined.get("rollout/seconds")
    if seconds:
        combined["rollout/tokens_per_second"] = combined["rollout/tokens"] / seconds
    return combined


def status_metrics(status: EngineStatus) -> dict[str, float]:
    """Return the logged metrics of an engine's state by name."""
    return {
        "rollout/policy_version": status.policy_version,
        "rollout/kv_bytes": status.kv_bytes,
        "rollout/kv_blocks_used": status.kv_blocks_used,
    }
