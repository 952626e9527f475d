"""Every figure that is logged: its unit, its meaning, and what to do when it moves.

One entry a name; `docs/metrics.md`, the wandb panels and a test are made from them. Plain data.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    """One logged figure."""

    name: str
    unit: str
    meaning: str
    advice: str
    """What to do when it moves."""
    panel: str
    """The dashboard panel it is drawn in."""


SPEED, MEMORY, DRIFT, CHOICE, AGE = "Speed", "Memory", "Drift", "Strategy", "Staleness"

METRICS = (
    Metric("rollout/seconds", "s", "Wall time of the rollout.",
           "Rising with equal tokens: look at preemptions and at step_share.", SPEED),
    Metric("rollout/tokens_per_second", "tokens/s", "Sampled tokens over the rollout's time.",
           "Falling: a few long completions run alone; over-sample, or carry them over.", SPEED),
    Metric("rollout/useful_tokens_per_second", "tokens/s",
           "Tokens of the groups that a strategy returned, over its time.",
           "Falling against tokens_per_second: more is thrown away; lower the extra groups.",
           SPEED),
    Metric("rollout/tokens", "tokens", "Tokens sampled in the rollout.",
           "Rising steadily: completions grow; watch completions/clipped_ratio.", SPEED),
    Metric("rollout/tokens_total", "tokens", "Tokens sampled since the last log, asynchronously.",
           "As tokens.", SPEED),
    Metric("rollout/step_share", "fraction of 1",
           "The rollout's part of the optimizer step's wall time.",
           "Near 1: rollouts are the bottleneck; near 0: the loss is.", SPEED),
    Metric("rollout/prefill_tokens", "tokens", "Prompt tokens that went through a forward.",
           "Rising with equal prompts: sharing is off, or blocks are evicted.", SPEED),
    Metric("rollout/prefill_tokens_saved", "tokens",
           "Prompt tokens that a group or a known prefix had already.",
           "Zero with groups: prompts of a group differ, or allow_block_sharing is off.", SPEED),
    Metric("rollout/drafted_tokens", "tokens",
           "Tokens that a sequence was expected to say, and that a decode step of few checked.",
           "Zero: many sequences run, or nothing repeats.", SPEED),
    Metric("rollout/accepted_tokens", "tokens",
           "How many of them were sampled; each saves its sequence a step.",
           "Far below drafted_tokens: set num_speculative_tokens=0, and look at the speed.", SPEED),
    Metric("rollout/preemptions", "count", "Sequences put back because the KV cache was full.",
           "Above 0: raise max_memory_percent or num_blocks, or lower max_requests_per_batch.",
           MEMORY),
    Metric("rollout/kv_blocks_peak", "blocks", "Most KV cache blocks in use at once.",
           "At num_blocks: the cache bounds the batch.", MEMORY),
    Metric("rollout/kv_blocks_used", "blocks", "KV cache blocks in use at the end.",
           "Above 0 with nothing in flight is a fault; please report it.", MEMORY),
    Metric("rollout/kv_bytes", "bytes", "KV cache memory held at the end.",
           "It is given back between steps unless release_cache='never'.", MEMORY),
    Metric("rollout/policy_version", "count", "Weight syncs so far; tokens are stamped with it.",
           "Standing still while training: sync_weights() is not called.", AGE),
    Metric("rollout/staleness_mean", "versions",
           "How many syncs before it was taken a token was sampled, mean over tokens.",
           "Rising: generation outpaces training; lower max_staleness or the extra groups.", AGE),
    Metric("rollout/staleness_max", "versions", "The same, largest.",
           "Beyond max_staleness the trainer drops the completion.", AGE),
    Metric("rollout/logprob_drift_max", "nats",
           "Largest difference between a sampled log-probability and a plain forward's.",
           "Above 1e-5 in float32, or rising: see max_logprob_drift and verify_every_steps.",
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
    Metric("rollout/logprob_drift_first_token", "tokens",
           "In the worst sequence, the first token that differs notably; absent where none does.",
           "Always 0: the prompt is seen differently. Later: keys went wrong there.", DRIFT),
    Metric("rollout/log_kept_mass", "nats",
           "Log-probability of the tokens that top-k, top-p and min-p left, mean over tokens.",
           "Far below 0: truncation biases the loss; set sampling_mask='replay'.", DRIFT),
    Metric("rollout/kept_tokens", "tokens", "How many tokens truncation left, mean over tokens.",
           "Near 1: sampling is nearly greedy; loosen top_p, top_k or min_p.", DRIFT),
    Metric("rollout/groups_kept", "groups", "Groups that the strategy returned.",
           "Below what was asked for: the prompts have come to an end.", CHOICE),
    Metric("rollout/groups_dropped", "groups",
           "Groups replaced, for want of an advantage or of scores.",
           "Rising: the data is too easy or too hard; at its bound, groups are kept as they come.",
           CHOICE),
    Metric("rollout/groups_dropped_total", "groups", "The same since the last log, asynchronously.",
           "As groups_dropped.", CHOICE),
    Metric("rollout/groups_cancelled", "groups", "Groups cancelled unfinished.",
           "Their tokens are lost; lower num_extra_groups, or carry them over.", CHOICE),
    Metric("rollout/groups_cancelled_total", "groups",
           "Groups started anew because they were too old, since the last log.",
           "Above 0: raise max_staleness, or lower max_inflight_tasks.", CHOICE),
    Metric("rollout/groups_carried", "groups", "Groups unfinished at the end, carried over.",
           "At num_extra_groups in every step is as it should be.", CHOICE),
    Metric("rollout/tokens_discarded", "tokens", "Tokens sampled and not returned.",
           "The price of the strategy; compare with the groups' tokens.", CHOICE),
    Metric("rollout/retries", "count", "Completions generated again, and rewards called again.",
           "Above 0: the environment fails; look at its own log.", CHOICE),
)  # fmt: skip
# Names that begin with "rollout/"; TRL's own ("sampling/...") are documented by TRL.
