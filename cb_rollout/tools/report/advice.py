"""Say in words what a run's metrics show, where a pattern has a known cause. Pure functions."""

from collections.abc import Iterator
from statistics import mean, median

from cb_rollout.tools.report.figures import DRIFT_KEYS, Metrics, series
from cb_rollout.tools.report.svg import compact

# Steps at each end of a run that are looked at.
WINDOW = 10

# A drift that grows by less, or is smaller in nats, may be rounding on other tokens.
DRIFT_GROWTH, LEAST_DRIFT = 4.0, 1e-3

# Shares from which a step's fault is more than chance.
MANY_EQUAL_GROUPS, MANY_CLIPPED, LONG_ROLLOUT = 0.5, 0.3, 0.8


def advice(metrics: Metrics) -> Iterator[str]:
    """Yield a sentence or two about each known pattern in the last steps of a run."""
    for key in DRIFT_KEYS:
        drift = [value for _, value in series(metrics, key)]
        first, last = (median(part) if part else 0.0 for part in (drift[:WINDOW], drift[-WINDOW:]))
        if len(drift) >= 2 * WINDOW and last > max(LEAST_DRIFT, DRIFT_GROWTH * first):
            yield (
                f"{key} grows: {compact(first)} nats at first, {compact(last)} now. "
                "cb-rollout audit names the cause."
            )
    if (equal := _recent(metrics, "frac_reward_zero_std")) >= MANY_EQUAL_GROUPS:
        yield (
            f"{equal:.0%} of the groups have equal rewards, and train nothing. Take easier or "
            "harder prompts, a finer reward, or the strategy DynamicSampling."
        )
    if (clipped := _recent(metrics, "completions/clipped_ratio")) >= MANY_CLIPPED:
        yield (
            f"{clipped:.0%} of the completions end by their length. Raise max_completion_length, "
            "or reward short answers."
        )
    if preemptions := _recent(metrics, "rollout/preemptions"):
        yield (
            f"The KV cache is full: {compact(preemptions)} preemptions a step. Raise "
            "max_memory_percent or num_blocks, or lower max_requests_per_batch."
        )
    if (share := _recent(metrics, "rollout/step_share")) >= LONG_ROLLOUT:
        yield (
            f"Rollouts take {share:.0%} of a step. Longer completions cost most: look at "
            "the spread of lengths, and at OverSampling."
        )


def _recent(metrics: Metrics, key: str) -> float:
    """Return the mean of the last values; 0 if there is none."""
    values = [value for _, value in series(metrics, key)[-WINDOW:]]
    return mean(values) if values else 0.0
