"""List every logged metric: name, unit, meaning, advice and panel.

`docs/metrics.md` is written from it, and the wandb panels are drawn from it. The package logs the
names; `tests/metrics/test_registry.py` compares them with these.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    """Logged metric of a rollout or a training step."""

    name: str
    unit: str
    meaning: str
    advice: str
    """Advice for a value that moves."""
    panel: str
    """Title of the dashboard panel."""


SPEED, MEMORY, DRIFT, CHOICE, AGE = "Speed", "Memory", "Drift", "Strategy", "Staleness"

# Names that begin with "rollout/"; TRL documents its own ("sampling/...").
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
    Metric("rollout/prefill_tokens", "tokens", "Prompt tokens that went through a forward.",
           "Rising with equal prompts: sharing is off, or blocks are evicted.", SPEED),
    Metric("rollout/prefill_tokens_saved", "tokens",
           "Prompt tokens that a group or a cached prefix had already.",
           "Zero with groups: prompts of a group differ, or allow_block_sharing is off.", SPEED),
    Metric("rollout/images_encoded", "images", "Images that went through the vision tower.",
           "Above those of distinct prompts: some were preempted, or prefixes evicted.", SPEED),
    Metric("rollout/preemptions", "count", "Sequences preempted because the KV cache was full.",
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
           "Far below 0: truncation biases the loss; set sampling_mask='replay'.", DRIFT),
    Metric("rollout/kept_tokens", "tokens", "Candidates that truncation left, mean over tokens.",
           "Near 1: sampling is nearly greedy; loosen top_p, top_k or min_p.", DRIFT),
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
