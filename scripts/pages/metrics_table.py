"""List every logged metric: name, unit, meaning, advice and panel; and the histograms of wandb.

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
           "Rising at equal tokens: look at preemptions and step_share.", SPEED),
    Metric("rollout/tokens_per_second", "tokens/s", "Sampled tokens per second of the rollout.",
           "Falling: a few long completions run alone; over-sample, or carry them over.", SPEED),
    Metric("rollout/useful_tokens_per_second", "tokens/s",
           "Tokens of the groups that a strategy returned, per second of its time.",
           "Falling against tokens_per_second: more is thrown away; lower the extra groups.",
           SPEED),
    Metric("rollout/tokens", "tokens", "Tokens sampled in the rollout.",
           "Rising steadily: completions grow; watch completions/clipped_ratio.", SPEED),
    Metric("rollout/tokens_total", "tokens", "Tokens sampled since the last log, asynchronously.",
           "As tokens.", SPEED),
    Metric("rollout/step_share", "fraction of 1",
           "The rollout's share of the optimizer step's wall time.",
           "Near 1: rollouts are the bottleneck; near 0: the loss is.", SPEED),
    Metric("rollout/loss_seconds", "seconds",
           "Forward and backward of the loss in an optimizer step, without rollout and scoring.",
           "If it is most of the step: set loss_forward='packed'.", SPEED),
    Metric("rollout/loss_tokens_computed", "tokens",
           "Tokens that went through the model in one forward of the loss, padding included.",
           "Far above loss_tokens_useful: set loss_forward='packed'.", SPEED),
    Metric("rollout/loss_tokens_useful", "tokens",
           "Of these, the tokens that a log-probability depends on: no padding, a shared prompt "
           "once.",
           "As loss_tokens_computed.", SPEED),
    Metric("rollout/prompts_shared", "sequences",
           "Completions whose prompt the loss did not compute again: another one of the batch "
           "begins with the same prompt.",
           "Zero with loss_forward='packed': the batch splits groups; raise "
           "per_device_train_batch_size.", SPEED),
    Metric("rollout/rows_left_out", "sequences",
           "Completions that the loss computed without a gradient: no advantage, or masked.",
           "Near the batch size: rewards do not distinguish completions.", SPEED),
    Metric("rollout/prefill_tokens", "tokens",
           "Tokens computed in prefills: prompts, and after a preemption the tokens that were "
           "generated before it.",
           "Rising with equal prompts: sharing is off, or blocks are evicted.", SPEED),
    Metric("rollout/prefill_tokens_saved", "tokens",
           "Prefill tokens that were not computed, since a group or a cached prefix had them.",
           "Zero with groups: prompts of a group differ, or allow_block_sharing is off.", SPEED),
    Metric("rollout/images_encoded", "images", "Images that went through the vision tower.",
           "Above the images of distinct prompts: preemptions, or evicted prefixes.", SPEED),
    Metric("rollout/preemptions", "count", "Sequences preempted because the KV cache was full.",
           "Above 0: raise max_memory_percent or num_blocks, or lower max_requests_per_batch.",
           MEMORY),
    Metric("rollout/offloaded_sequences", "count",
           "Preempted sequences whose keys went to host memory.",
           "Below rollout/preemptions: cpu_offload_space is full, or a prefill is faster.",
           MEMORY),
    Metric("rollout/restored_sequences", "count",
           "Preempted sequences whose keys came back from host memory.",
           "Below rollout/offloaded_sequences: raise cpu_offload_space.", MEMORY),
    Metric("rollout/kv_blocks_peak", "blocks", "Most KV cache blocks in use at once.",
           "At num_blocks: the cache limits the batch.", MEMORY),
    Metric("rollout/kv_blocks_used", "blocks", "KV cache blocks in use at the end.",
           "Above 0 with nothing in flight is a fault; please report it.", MEMORY),
    Metric("rollout/kv_bytes", "bytes", "KV cache memory held at the end.",
           "It is freed between steps unless release_cache='never'.", MEMORY),
    Metric("rollout/policy_version", "count", "Weight syncs so far; every token carries it.",
           "Constant while training: sync_weights() is not called.", AGE),
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
           "Rising with the maximum: a systematic difference, such as dtype or dropout.", DRIFT),
    Metric("rollout/logprob_drift_k1", "nats",
           "KL divergence of the sampled from the recomputed distribution; may be negative.",
           "Away from 0 beyond its noise: sampled tokens are systematically likelier.", DRIFT),
    Metric("rollout/logprob_drift_k3", "nats", "The same by an estimate that is never negative.",
           "Rising: as logprob_drift_mean.", DRIFT),
    Metric("rollout/logprob_drift_chi_squared", "1",
           "Mean of the squared probability ratio, less 1.",
           "Rising before the mean does: a few tokens are far off.", DRIFT),
    Metric("rollout/logprob_drift_effective_sample_size", "fraction of 1",
           "Effective sample size of importance sampling with these ratios, as a share of the "
           "tokens.",
           "Below 0.99: importance sampling would be noisy; recompute old log-probabilities.",
           DRIFT),
    Metric("rollout/router_disagreement", "fraction of 1",
           "Share of the experts that the loss's own routers would choose otherwise than the "
           "rollout did (router_replay).",
           "Rising: the batch is stale, or the loss computes in another way than the rollout.",
           DRIFT),
    Metric("rollout/logprob_drift_first_token", "tokens",
           "In the worst sequence, the first token that differs beyond rounding; absent if none.",
           "Always 0: the two see different prompts. Later: the KV cache differs there.", DRIFT),
    Metric("rollout/log_kept_mass", "nats",
           "Logarithm of the probability that top_k, top_p and min_p left to choose from, mean "
           "over tokens.",
           "Far below 0: truncation biases the loss; set sampling_mask='replay'.", DRIFT),
    Metric("rollout/kept_tokens", "tokens",
           "Tokens that top_k, top_p and min_p left to choose from, mean over tokens.",
           "Near 1: sampling is nearly greedy; loosen top_p, top_k or min_p.", DRIFT),
    Metric("rollout/groups_kept", "groups", "Groups that the strategy returned.",
           "Below the requested number: the prompts ran out.", CHOICE),
    Metric("rollout/groups_dropped", "groups",
           "Groups replaced because they had no advantage or no scores.",
           "Rising: the data is too easy or too hard; at max_dropped_groups, any group is kept.",
           CHOICE),
    Metric("rollout/groups_dropped_total", "groups", "The same since the last log, asynchronously.",
           "As groups_dropped.", CHOICE),
    Metric("rollout/groups_cancelled", "groups", "Groups cancelled unfinished.",
           "High: their tokens are lost; lower num_extra_groups, or carry them over.", CHOICE),
    Metric("rollout/groups_cancelled_total", "groups",
           "Groups started again because they were too old, since the last log.",
           "Above 0: raise max_staleness, or lower max_inflight_tasks.", CHOICE),
    Metric("rollout/groups_carried", "groups", "Groups unfinished at the end, carried over.",
           "It should be num_extra_groups in every step.", CHOICE),
    Metric("rollout/tokens_discarded", "tokens", "Tokens sampled and not returned.",
           "This is the cost of the strategy; compare it with the groups' tokens.", CHOICE),
    Metric("rollout/agent_tokens_left_out", "fraction of 1",
           "Share of sampled tokens that are not trained on, because an agent rewrote the "
           "conversation after them.",
           "Rising: the agent summarizes or tries again; train on the sessions in your own loop.",
           CHOICE),
    Metric("rollout/retries", "count", "Completions generated again, and rewards called again.",
           "Above 0: the environment fails; look at its own log.", CHOICE),
)  # fmt: skip

HISTOGRAM = "Histograms"

# Of the tokens of a step, in wandb alone.
HISTOGRAMS = (
    Metric("rollout/logprobs", "nats", "Sampled log-probabilities.",
           "Concentrated at 0: the policy is nearly deterministic; watch the entropy.", HISTOGRAM),
    Metric("rollout/logprob_drift", "nats",
           "Drift: a token's sampled log-probability minus the trainer's in its first loss.",
           "Wide, or off 0: as logprob_drift_max; `cb-rollout audit` names the cause.", HISTOGRAM),
    Metric("rollout/importance_sampling_ratio", "1",
           "The trainer's over the sampled probability: exp(-drift), before any bound.",
           "A long tail: a few tokens carry the loss; lower staleness, or bound the ratio.",
           HISTOGRAM),
)  # fmt: skip
