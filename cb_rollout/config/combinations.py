"""Name the pairs of features that are refused, with the reason and the way out.

`docs/compatibility.md` is written from it. The module that knows both features raises
`refused(name)`. Refusals of a value, a model or a device stay with the check that finds them.
"""

from collections import defaultdict
from typing import NamedTuple

from cb_rollout.errors import ConfigurationError


class Combination(NamedTuple):
    """Two features that do not go together."""

    feature: str
    other: str
    reason: str
    """Text of the error: what goes wrong, then what to set; `{}` names are values of the run."""


COMBINATIONS = {
    "async batching, no graphs": Combination("`use_async_batching=True`", "`use_cuda_graph=False`",
        "use_async_batching=True launches CUDA graphs ahead, and use_cuda_graph={graphs} has none; "
        "leave one of them at None."),
    "async batching, recurrent states": Combination(
        "`use_async_batching=True`", "a model with recurrent states",
        "use_async_batching=True needs a model without recurrent states, which a step that is "
        "launched ahead and given up would have moved; leave it at None."),
    "async trainer, copy": Combination("`AsyncRollouts`", "`weight_sync='copy'`",
        "weight_sync='copy': the engine's model is a copy already, which the trainer writes; leave "
        "it at 'auto'."),
    "async trainer, images": Combination("`AsyncRollouts`", "images",
        "{where}, and AsyncGRPOTrainer's loss takes text alone; use attach with a GRPOTrainer."),
    "async trainer, router replay": Combination("`AsyncRollouts`", "`router_replay=True`",
        "router_replay=True: the asynchronous trainer's batches carry no experts, so its loss "
        "would choose its own; leave it False, or attach a GRPOTrainer."),
    "async trainer, strategy and tools": Combination(
        "`AsyncRollouts` with tools or environments", "a strategy",
        "a strategy with tools or environments: TRL's own loop scores conversations; leave "
        "strategy out."),
    "bitwise, adapter in a copy": Combination(
        "`numerics='bitwise'`", "an adapter and `weight_sync='copy'`",
        "numerics='bitwise': a copy merges the adapter, and rounds after the sum where the trainer "
        "rounds before; leave weight_sync at 'auto' or set 'shared'."),
    "bitwise, another setting": Combination(
        "`numerics='bitwise'`", "`rollout_dtype` or `use_default_compile_configs=True`",
        "numerics='bitwise': {name}={value} {reason}; leave it unset."),
    "bitwise, dropout": Combination("`numerics='bitwise'`", "dropout in training",
        "numerics='bitwise': the model trains with dropout (rate {rate}); set disable_dropout=True "
        "in the trainer's config, and lora_dropout=0 and attention_dropout=0 where they are set."),
    "bitwise, rounded outputs": Combination("`numerics='bitwise'`", "FSDP2 with mixed precision",
        "numerics='bitwise': FSDP2's mixed precision rounds the trainer's log-probabilities to "
        "{dtype}; set output_dtype=torch.float32 in the mixed_precision_policy of "
        "trainer.accelerator.state.fsdp_plugin before attach, or train without mixed precision."),
    "copy, quantised": Combination("`weight_sync='copy'`", "a quantised model",
        "weight_sync='copy' of a quantised model: its weights are not plain tensors; use 'shared', "
        "which runs them in place with any adapter unmerged."),
    "drift, sampled old logps": Combination(
        "`on_logprob_drift='recompute'`", "another `old_logps` than `'rollout'`",
        "on_logprob_drift='recompute' needs old_logps='rollout' and a max_logprob_drift; set both, "
        "or leave it at 'raise'."),
    "loss tokens, one forward": Combination(
        "a number as `loss_tokens_per_forward`", "FSDP, ZeRO-3 or a router loss",
        "loss_tokens_per_forward={tokens} cannot be honoured under {reason}; leave it at 'auto' "
        "and lower per_device_train_batch_size."),
    "masked, unknown stops": Combination(
        "`mask_truncated_completions` under RLOO", "stop strings or other stop tokens",
        "mask_truncated_completions=True would leave out completions that {ended_by} ended: RLOO's "
        "trainer takes for whole only what ends in its own end-of-sequence token, and computes old "
        "log-probabilities and rewards from that; leave it False, or take stop_strings and "
        "eos_token_id out of generation_kwargs."),
    "pool, adapters split": Combination(
        "`RolloutPool(peft_config=...)`", "`tensor_parallel_size` above 1",
        "tensor_parallel_size={size} with peft_config: a split worker has no adapters of its own; "
        "leave peft_config out, and a sync merges them into the weights that it sends."),
    "pool, several processes": Combination(
        "`RolloutPool(accelerator=...)`", "`use_strategy` or `AsyncRollouts`",
        "several processes share the pool, and {sampler} samples in each by itself; make the pool "
        "without accelerator=, with workers of each process's own."),
    "pool, shared weights": Combination("`RolloutPool`", "`weight_sync='shared'`",
        "weight_sync='shared': a pool's workers have weights of their own; leave it at 'auto'."),
    "pool, trainer's needs": Combination(
        "`attach(trainer, pool)`",
        "`return_logprobs=False` or `release_cache='with_weights'`",
        "{fault}: a trainer with a pool cannot use it; {advice}."),
    "released weights, shared": Combination(
        "`release_cache='with_weights'` and `sleep(level=2)`", "`weight_sync='shared'`",
        "the weights that generate are the training module's, so a sleep cannot release them; set "
        "weight_sync='copy', or use release_cache='between_steps' and sleep()."),
    "replay, adjusted": Combination(
        "`sampling_mask='replay'`", "penalties, biases or forced tokens",
        "sampling_mask='replay' knows top_k, top_p and min_p, not penalties, biases or "
        "forced tokens; take repetition_penalty and the like out of the trainer's settings and "
        "generation_kwargs, or set sampling_mask='ignore'."),
    "replay, foreign completions": Combination(
        "`sampling_mask='replay'` or `router_replay=True`", "a `rollout_func` of your own",
        "{setting} needs completions of the attached generator, and rollout_func brought others; "
        "generate with cb_rollout.make_rollout_func, or set {other}."),
    "replay, unknown row": Combination(
        "`sampling_mask='replay'` or `router_replay=True`",
        "rows that a trainer class of your own makes or keeps for longer",
        "row {number} of a batch of {num_rows} has {num_prompt_tokens} tokens of a prompt and "
        "{num_completion_tokens} of a completion, which the attached generator sampled neither in "
        "the latest rollout nor in the {num_earlier} training rollouts before it that are kept, "
        "and {setting} needs its record; raise replay_num_rollouts, train on tokens as they were "
        "sampled, or set {other}."),
    "rollout dtype, autocast": Combination(
        "`rollout_dtype`", "another mixed precision of accelerate",
        "rollout_dtype={value} under accelerate's mixed precision {precision}, in which the "
        "model's forward computes whoever calls it; use 'auto', or weight_sync='copy'."),
    "router replay, compiled": Combination("`router_replay=True`", "`torch_compile`",
        "router_replay=True: torch_compile=True compiles the routers too; leave one of them "
        "False."),
    "sampled old logps, processed": Combination(
        "`old_logps='rollout'`", "`logprobs_mode='processed'` with truncation or penalties",
        "old_logps='rollout' with logprobs_mode='processed' would hold log-probabilities after "
        "truncation or penalties against the loss's, which are before; set sampling_mask='replay' "
        "or logprobs_mode='policy'."),
    "saved rollouts, strategy": Combination("`SavedRollouts`", "`use_strategy`",
        "a strategy decides what to sample, and saved rollouts were sampled; use Plain(), or "
        "attach a RolloutConfig."),
    "served, tensor parallel": Combination("`serve()`", "a tensor-parallel model",
        "a tensor-parallel model is not served: requests would reach one process of its group "
        "only; leave tensor_parallel_size at 1 and load the model on one device, or serve with "
        "vLLM or SGLang."),
    "strategy, batch": Combination(
        "a strategy",
        "tensor parallelism, or rows that are no multiple of `num_generations`; one that samples "
        "ahead: tools, environments, a `rollout_func`; one that carries sequences: "
        "`release_cache='with_weights'`",
        "{name} does not go with {fault}; use Plain(), or change that."),
    "strategy, carried tokens": Combination(
        "a strategy that carries sequences", "`vllm_importance_sampling_correction` off, and RLOO",
        "{name} carries tokens of older policies, and without "
        "vllm_importance_sampling_correction=True the loss would take them for its own; set that, "
        "which RLOO does not have, or old_logps='rollout'."),
    "strategy, retried groups": Combination(
        "a strategy with `max_retries` or `min_group_size`", "`GRPOTrainer`, `RLOOTrainer`",
        "{name} under {trainer}: its batch holds num_generations completions of each prompt, and "
        "it scores them itself, so nothing can be tried again or left out; use a GroupCollector in "
        "a loop of your own, or AsyncGRPOTrainer with AsyncRollouts."),
    "tensor parallel, shared": Combination(
        "`tensor_parallel_size` above 1", "`weight_sync='shared'`",
        "tensor_parallel_size={size} with weight_sync='shared': the training module is not split; "
        "leave weight_sync at 'auto', which makes a copy that is."),
    "token advantages, trainer": Combination(
        "`attach(token_advantages=...)`", "another trainer than GRPO",
        "token_advantages under {trainer}, whose loss has no advantage for each token; leave it "
        "out."),
    "tool timeout, one thread": Combination("`tool_timeout_seconds`", "`concurrent_tools=False`",
        "tool_timeout_seconds={seconds} needs a thread for each conversation; leave "
        "concurrent_tools=True."),
    "transformers' batching": Combination(
        "`attach`", "TRL with transformers' own continuous batching",
        "use_transformers_continuous_batching=True and cb_rollout both want to generate; leave it "
        "False."),
}  # fmt: skip


def refused(name: str, /, **values: object) -> ConfigurationError:
    """Return the error of two features of this run; `values` fill the reason's braces."""
    return ConfigurationError(COMBINATIONS[name].reason.format(**values))


def described(combination: Combination) -> str:
    """Return a reason for a reader who has no run: its values are left out."""
    return combination.reason.format_map(defaultdict(lambda: "..."))
