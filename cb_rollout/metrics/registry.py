"""Define every metric: its name, unit and meaning, and how it is computed.

To add a metric, add its entry here, and set its value where it is measured. `docs/metrics.md`,
the wandb panels and Prometheus read this registry. Prometheus sees `cb_rollout_<name>` (counters
with `_total`). Loads no torch; the engine's thread writes the counters.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple


class MetricKind(StrEnum):
    """Prometheus type of a live metric: a growing total, or a value of the moment."""

    COUNTER = "counter"
    GAUGE = "gauge"


def _live(help_text: str, **options: Any) -> Any:
    return field(**options, metadata={"help": help_text})


_total = partial(_live, default=0)


@dataclass(slots=True)
class EngineCounters:
    """Running totals since the engine was made; the difference of two copies is one rollout's."""

    requests_finished: int = _total("Sequences that ended, well or not; cancelled ones left out.")
    tokens_generated: int = _total("Sampled tokens.")
    prefill_tokens: int = _total("Prompt tokens that went through a forward.")
    prefill_tokens_saved: int = _total("Prompt tokens that a group or a cached prefix had already.")
    preemptions: int = _total("Sequences preempted for want of KV blocks, to resume later.")
    images_encoded: int = _total("Images that went through the vision tower.")
    prefill_forwards: int = _total("Forwards of prompts.")
    decode_forwards: int = _total("Forwards of running sequences.")
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
        """Return the totals of two engines; peaks at different moments are added too."""
        return EngineCounters(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(self))
        )

    def since(self, earlier: "EngineCounters") -> "EngineCounters":
        """Return the totals added after `earlier`, with today's peak."""
        added = (getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self))
        return replace(EngineCounters(*added), kv_blocks_peak=self.kv_blocks_peak)

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


class LiveMetric(NamedTuple):
    """Metric of `EngineCounters` or `EngineStatus`, exported while the engine runs."""

    name: str
    kind: MetricKind
    help: str

    def read(self, counters: EngineCounters, status: EngineStatus) -> float:
        return getattr(counters if self.kind is MetricKind.COUNTER else status, self.name)


LIVE_METRICS = tuple(
    LiveMetric(entry.name, kind, entry.metadata["help"])
    for record, kind in ((EngineCounters, MetricKind.COUNTER), (EngineStatus, MetricKind.GAUGE))
    for entry in fields(record)
    if entry.metadata
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


class Metric(NamedTuple):
    """Logged metric of a rollout or a training step."""

    name: str
    unit: str
    meaning: str
    advice: str
    """Advice for a value that moves."""
    panel: str
    """Title of the dashboard panel."""
    of_rollout: Callable[[EngineCounters, float], float | None] | None = None
    """Function of the rollout's counters and seconds, which returns None to leave the metric out;
    None: logged by the code that measures it."""


def _counted(name: str, unit: str, meaning: str, advice: str, panel: str) -> Metric:
    return Metric(
        f"rollout/{name}", unit, meaning, advice, panel, lambda added, _: getattr(added, name)
    )


def _per_truncated(added: EngineCounters, total: float) -> float | None:
    return total / added.truncated_tokens if added.truncated_tokens else None


SPEED, MEMORY, DRIFT, CHOICE, AGE = "Speed", "Memory", "Drift", "Strategy", "Staleness"

# Names that begin with "rollout/"; TRL documents its own ("sampling/...").
METRICS = (
    Metric("rollout/seconds", "s", "Wall time of the rollout.",
           "Rising with equal tokens: look at preemptions and at step_share.", SPEED,
           lambda _, seconds: seconds),
    Metric("rollout/tokens_per_second", "tokens/s", "Sampled tokens over the rollout's time.",
           "Falling: a few long completions run alone; over-sample, or carry them over.", SPEED,
           lambda added, seconds: added.tokens_generated / seconds if seconds else 0.0),
    Metric("rollout/useful_tokens_per_second", "tokens/s",
           "Tokens of the groups that a strategy returned, over its time.",
           "Falling against tokens_per_second: more is thrown away; lower the extra groups.",
           SPEED),
    Metric("rollout/tokens", "tokens", "Tokens sampled in the rollout.",
           "Rising steadily: completions grow; watch completions/clipped_ratio.", SPEED,
           lambda added, _: added.tokens_generated),
    Metric("rollout/tokens_total", "tokens", "Tokens sampled since the last log, asynchronously.",
           "As tokens.", SPEED),
    Metric("rollout/step_share", "fraction of 1",
           "The rollout's part of the optimizer step's wall time.",
           "Near 1: rollouts are the bottleneck; near 0: the loss is.", SPEED),
    Metric("rollout/loss_seconds", "seconds",
           "Forward and backward pass of the loss in an optimizer step; rollout and scoring apart.",
           "Most of the step: set loss_forward='packed'.", SPEED),
    Metric("rollout/loss_tokens_computed", "tokens",
           "Tokens that went through the model in one forward of the loss, padding included.",
           "Far above loss_tokens_useful: set loss_forward='packed'.", SPEED),
    Metric("rollout/loss_tokens_useful", "tokens",
           "Tokens that the scores need: completions without the last, each common prefix once.",
           "As loss_tokens_computed.", SPEED),
    Metric("rollout/prompts_shared", "sequences",
           "Completions whose prompt the loss computed for another one of the batch.",
           "Zero with loss_forward='packed': the batch splits groups; raise "
           "per_device_train_batch_size.", SPEED),
    Metric("rollout/rows_left_out", "sequences",
           "Completions that the loss computed without a gradient: no advantage, or masked.",
           "Near the batch: rewards do not tell completions apart.", SPEED),
    _counted("prefill_tokens", "tokens", "Prompt tokens that went through a forward.",
           "Rising with equal prompts: sharing is off, or blocks are evicted.", SPEED),
    _counted("prefill_tokens_saved", "tokens",
           "Prompt tokens that a group or a cached prefix had already.",
           "Zero with groups: prompts of a group differ, or allow_block_sharing is off.", SPEED),
    _counted("images_encoded", "images", "Images that went through the vision tower.",
           "Above those of distinct prompts: some were preempted, or prefixes evicted.", SPEED),
    _counted("preemptions", "count", "Sequences preempted because the KV cache was full.",
           "Above 0: raise max_memory_percent or num_blocks, or lower max_requests_per_batch.",
           MEMORY),
    _counted("kv_blocks_peak", "blocks", "Most KV cache blocks in use at once.",
           "At num_blocks: the cache bounds the batch.", MEMORY),
    Metric("rollout/kv_blocks_used", "blocks", "KV cache blocks in use at the end.",
           "Above 0 with nothing in flight is a fault; please report it.", MEMORY),
    Metric("rollout/kv_bytes", "bytes", "KV cache memory held at the end.",
           "It is given back between steps unless release_cache='never'.", MEMORY),
    Metric("rollout/policy_version", "count", "Weight syncs so far; tokens are stamped with it.",
           "Standing still while training: sync_weights() is not called.", AGE),
    Metric("rollout/staleness_mean", "versions",
           "Syncs between the sampling of a token and its use, mean over tokens.",
           "Rising: generation outpaces training; lower max_staleness or the extra groups.", AGE),
    Metric("rollout/staleness_max", "versions", "Largest staleness of a token.",
           "Beyond max_staleness the trainer drops the completion.", AGE),
    Metric("rollout/logprob_drift_max", "nats",
           "Largest difference between a sampled log-probability and a plain forward's.",
           "Far above the model's own rounding (docs/numerics.md), or rising: see "
           "max_logprob_drift and verify_every_steps.",
           DRIFT),
    Metric("rollout/logprob_drift_mean", "nats", "The same, mean over the tokens compared.",
           "Rising with the maximum: a systematic difference, as of dtype or dropout.", DRIFT),
    Metric("rollout/logprob_drift_k1", "nats",
           "KL divergence of the sampled from the recomputed distribution; may be negative.",
           "Away from 0 beyond its noise: sampled tokens are systematically likelier.", DRIFT),
    Metric("rollout/logprob_drift_k3", "nats", "The same by an estimate that is never negative.",
           "Rising: as logprob_drift_mean.", DRIFT),
    Metric("rollout/logprob_drift_chi_squared", "1",
           "Mean of the squared probability ratio, less 1.",
           "Rising before the mean does: a few tokens are far off.", DRIFT),
    Metric("rollout/logprob_drift_effective_sample_size", "fraction of 1",
           "Share of the tokens that count, were they weighted by their ratios.",
           "Below 0.99: importance sampling would be noisy; recompute old log-probabilities.",
           DRIFT),
    Metric("rollout/router_disagreement", "fraction of 1",
           "Choices of routers that would differ from the rollout's, were they not replayed.",
           "Rising: the batch is stale, or the loss computes in another way than the rollout.",
           DRIFT),
    Metric("rollout/logprob_drift_first_token", "tokens",
           "In the worst sequence, the first token that differs notably; absent where none does.",
           "Always 0: the prompt is seen differently. Later: the KV cache differs there.", DRIFT),
    Metric("rollout/log_kept_mass", "nats",
           "Log-probability of the tokens that top-k, top-p and min-p left, mean over tokens.",
           "Far below 0: truncation biases the loss; set sampling_mask='replay'.", DRIFT,
           lambda added, _: _per_truncated(added, added.log_kept_mass)),
    Metric("rollout/kept_tokens", "tokens", "Candidates that truncation left, mean over tokens.",
           "Near 1: sampling is nearly greedy; loosen top_p, top_k or min_p.", DRIFT,
           lambda added, _: _per_truncated(added, added.kept_tokens)),
    Metric("rollout/groups_kept", "groups", "Groups that the strategy returned.",
           "Below what was asked for: the prompts ran out.", CHOICE),
    Metric("rollout/groups_dropped", "groups",
           "Groups replaced, for want of an advantage or of scores.",
           "Rising: the data is too easy or too hard; at its bound, groups are kept as they come.",
           CHOICE),
    Metric("rollout/groups_dropped_total", "groups", "The same since the last log, asynchronously.",
           "As groups_dropped.", CHOICE),
    Metric("rollout/groups_cancelled", "groups", "Groups cancelled unfinished.",
           "Their tokens are lost; lower num_extra_groups, or carry them over.", CHOICE),
    Metric("rollout/groups_cancelled_total", "groups",
           "Groups started again because they were too old, since the last log.",
           "Above 0: raise max_staleness, or lower max_inflight_tasks.", CHOICE),
    Metric("rollout/groups_carried", "groups", "Groups unfinished at the end, carried over.",
           "At num_extra_groups in every step is as it should be.", CHOICE),
    Metric("rollout/tokens_discarded", "tokens", "Tokens sampled and not returned.",
           "The price of the strategy; compare with the groups' tokens.", CHOICE),
    Metric("rollout/agent_tokens_left_out", "fraction of 1",
           "Sampled tokens of agents that rewrote their history, which no row trains on.",
           "Rising: the agent summarizes or tries again; train on the sessions in your own loop.",
           CHOICE),
    Metric("rollout/retries", "count", "Completions generated again, and rewards called again.",
           "Above 0: the environment fails; look at its own log.", CHOICE),
)  # fmt: skip


def rollout_metrics(added: EngineCounters, seconds: float) -> dict[str, float]:
    """Return the metrics of one rollout by name, from the counters and seconds that it added."""
    values = {m.name: m.of_rollout(added, seconds) for m in METRICS if m.of_rollout}
    return {name: value for name, value in values.items() if value is not None}


def status_metrics(status: EngineStatus) -> dict[str, float]:
    """Return the logged metrics of an engine's state by name."""
    names = "policy_version", "kv_bytes", "kv_blocks_used"
    return {f"rollout/{name}": getattr(status, name) for name in names}
