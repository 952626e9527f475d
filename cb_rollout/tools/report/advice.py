"""Say in words what a run's metrics show, where a pattern has a known cause. Pure functions."""

from collections.abc import Iterator
from statistics import mean, median

from cb_rollout.tools.report.figures import DRIFT_KEYS, Metrics, series
from cb_rollout.tools.report.svg import compact

# Steps at each end of a run that are looked at.
WINDOW = 10

# A drift that grows by less, or is smaller in nats, may be rounding on other tokens.
DRIFT_GROWTH, LEAST_DRIFT = 4.0, 1e-3

# Metrics, the mean of the last steps from which each is more than chance, and what to do.
PATTERNS = (
    (
        *("frac_reward_zero_std", 0.5),
        "{:.0%} of the groups have equal rewards, and train nothing. Take easier or harder "
        "prompts, a finer reward, or the strategy DynamicSampling.",
    ),
    (
        *("completions/clipped_ratio", 0.3),
        "{:.0%} of the completions end by their length. Raise max_completion_length, or reward "
        "short answers.",
    ),
    (
        *("rollout/preemptions", 0.1),
        "The KV cache is full: {:.1f} preemptions a step. Raise max_memory_percent or num_blocks, "
        "or lower max_requests_per_batch.",
    ),
    (
        *("rollout/step_share", 0.8),
        "Rollouts take {:.0%} of a step. Longer completions cost most: look at the spread of "
        "lengths, and at OverSampling.",
    ),
)


def advice(metrics: Metrics) -> Iterator[str]:
    """Yield a sentence or two about each known pattern in the last steps of a run."""
    for key in DRIFT_KEYS:
        drift = [value for _, value in series(metrics, key)]
        first, last = (median(part) if part else 0.0 for part in (drift[:WINDOW], drift[-WINDOW:]))
        if len(drift) >= 2 * WINDOW and last > max(LEAST_DRIFT, DRIFT_GROWTH * first):
            yield (
                f"{key} grows: {compact(first)} nats at first, {compact(last)} now. cb-rollout "
                "audit names the cause."
            )
    for key, least, sentence in PATTERNS:
        values = [value for _, value in series(metrics, key)[-WINDOW:]]
        if values and mean(values) >= least:
            yield sentence.format(mean(values))
