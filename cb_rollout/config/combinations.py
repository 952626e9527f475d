"""Name the pairs of features that are refused, with the reason and the way out.

`docs/compatibility.md` is written from `COMBINATIONS`. The module that knows both features raises
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
    """Text of the error: what goes wrong, then what to set. Names in `{}` stand for values."""


COMBINATIONS = {
    "adapter named, sharded": Combination(
        "`SamplingParams(adapter=...)`", "a copy of a sharded model",
        "a named adapter is read when the first sequence asks for it, and the model is sharded, so "
        "all processes would have to read it at that moment; make the adapter the active one, and "
        "sync."),
    "async batching, no graphs": Combination("`use_async_batching=True`", "`use_cuda_graph=False`",
        "use_async_batching=True launches CUDA graphs ahead of time, but use_cuda_graph={graphs} "
        "makes none; leave one of them at None."),
    "async batching, recurrent states": Combination(
        "`use_async_batching=True`", "a model with recurrent states",
        "use_async_batching=True needs a model without recurrent states: a step that is launched "
        "ahead and then discarded would already have changed them; leave it at None."),
    "async trainer, copy": Combination("`AsyncRollouts`", "`weight_sync='copy'`",
        "weight_sync='copy': the engine's model is already a copy, which the trainer writes; "
        "leave it at 'auto'."),
    "async trainer, images": Combination("`AsyncRollouts`", "images",
        "{where}, but AsyncGRPOTrainer's loss reads text only; attach a GRPOTrainer instead."),
    "async trainer, router replay": Combination("`AsyncRollouts`", "`router_replay=True`",
        "router_replay=True: the asynchronous trainer's batches carry no experts, so its loss "
        "would choose its own; set it to False, or attach a GRPOTrainer."),
    "async trainer, strategy and tools": Combination(
        "`AsyncRollouts` with tools or environments", "a strategy",
        "a strategy cannot be combined with tools or environments, because TRL's own loop scores "
        "the conversations; leave strategy out."),
    "audit, adapter named": Combination(
        "`cb_rollout.audit`", "outputs of `SamplingParams(adapter=...)`",
        "an audit compares outputs with the active adapters, and these outputs name the adapter "
        "that sampled them; make that adapter the active one, and set output.adapter = None."),
    "bitwise, adapter in a copy": Combination(
        "`numerics='bitwise'`", "an adapter and `weight_sync='copy'`",
        "numerics='bitwise': a copy merges the adapter into the weights, which rounds differently "
        "from the trainer's forward; set weight_sync to 'auto' or 'shared'."),
    "bitwise, another setting": Combination(
        "`numerics='bitwise'`", "`rollout_dtype` or a compiled forward",
        "numerics='bitwise': {name}={value} {reason}; leave it unset."),
    "bitwise, dropout": Combination("`numerics='bitwise'`", "dropout in training",
        "numerics='bitwise': the model trains with dropout (rate {rate}); set disable_dropout=True "
        "in the trainer's config, and lora_dropout=0 and attention_dropout=0 where they are set."),
    "bitwise, rounded outputs": Combination("`numerics='bitwise'`", "FSDP2 with mixed precision",
        "numerics='bitwise': FSDP2's mixed precision rounds the trainer's log-probabilities to "
        "{dtype}; set output_dtype=torch.float32 in the mixed_precision_policy of "
        "trainer.accelerator.state.fsdp_plugin before attach, or train without mixed precision."),
    "compile level, no default": Combination(
        "`default_compile_level` above 0", "`use_default_compile_configs=False`",
        "default_compile_level={level} compiles what use_default_compile_configs=False leaves "
        "uncompiled; set default_compile_level=0, or leave use_default_compile_configs at None."),
    "copy, quantised": Combination("`weight_sync='copy'`", "a quantised model",
        "weight_sync='copy' cannot copy a quantised model, whose weights are not plain tensors; "
        "use 'shared', which runs them in place with any adapter unmerged."),
    "drift, sampled old logps": Combination(
        "`on_logprob_drift='recompute'`", "another `old_logps` than `'rollout'`",
        "on_logprob_drift='recompute' needs old_logps='rollout' and a max_logprob_drift; set "
        "both, or leave on_logprob_drift at 'raise'."),
    "loss tokens, one forward": Combination(
        "a number as `loss_tokens_per_forward`", "FSDP, ZeRO-3 or a router loss",
        "loss_tokens_per_forward={tokens} cannot be honoured under {reason}; leave it at 'auto' "
        "and lower per_device_train_batch_size."),
    "masked, unknown stops": Combination(
        "`mask_truncated_completions` under RLOO", "stop strings or other stop tokens",
        "mask_truncated_completions=True would mask completions that {ended_by} ended: RLOO's "
        "trainer counts a completion as finished only if it ends in the trainer's own "
        "end-of-sequence token, and computes old log-probabilities and rewards accordingly; set "
        "it to False, or remove stop_strings and eos_token_id from generation_kwargs."),
    "pool, adapters split": Combination(
        "`RolloutPool(peft_config=...)`", "`tensor_parallel_size` above 1",
        "tensor_parallel_size={size} with peft_config: a split worker cannot hold adapters; leave "
        "peft_config out, so that a sync sends weights with the adapters merged."),
    "pool, several processes": Combination(
        "`RolloutPool(accelerator=...)`", "`use_strategy` or `AsyncRollouts`",
        "several processes share the pool, but {sampler} samples in each process separately; make "
        "the pool without accelerator=, so that each process has its own workers."),
    "pool, shared weights": Combination("`RolloutPool`", "`weight_sync='shared'`",
        "weight_sync='shared': a pool's workers have their own weights; leave it at 'auto'."),
    "pool, trainer's needs": Combination(
        "`attach(trainer, pool)`",
        "`return_logprobs=False` or `release_cache='with_weights'`",
        "{fault}: a trainer with a pool cannot use it; {advice}."),
    "released weights, shared": Combination(
        "`release_cache='with_weights'` and `sleep(level=2)`", "`weight_sync='shared'`",
        "the rollout uses the training module's own weights, so a sleep cannot release them; set "
        "weight_sync='copy', or use release_cache='between_steps' and sleep()."),
    "replay, adjusted": Combination(
        "`sampling_mask='replay'`", "penalties, biases or forced tokens",
        "sampling_mask='replay' can replay top_k, top_p and min_p, but not penalties, biases or "
        "forced tokens; remove repetition_penalty and the like from the trainer's settings and "
        "generation_kwargs, or set sampling_mask='ignore'."),
    "replay, foreign completions": Combination(
        "`sampling_mask='replay'` or `router_replay=True`", "a `rollout_func` of your own",
        "{setting} needs completions of the attached generator, but rollout_func returned others; "
        "generate with cb_rollout.make_rollout_func, or set {other}."),
    "replay, unknown row": Combination(
        "`sampling_mask='replay'` or `router_replay=True`",
        "rows that a trainer class of your own makes or keeps for longer",
        "{setting} needs the rollout's record of each row, and there is none for row {number} of "
        "a batch of {num_rows} ({num_prompt_tokens} prompt tokens, {num_completion_tokens} "
        "completion tokens): the attached generator sampled it neither in the latest rollout nor "
        "in the {num_earlier} earlier training rollouts that are kept. Raise replay_num_rollouts, "
        "train on tokens exactly as they were sampled, or set {other}."),
    "rollout dtype, autocast": Combination(
        "`rollout_dtype`", "another mixed precision of accelerate",
        "rollout_dtype={value} cannot be used: under accelerate's mixed precision, the model's "
        "forward always computes in {precision}; use 'auto', or weight_sync='copy'."),
    "router replay, compiled": Combination("`router_replay=True`", "`torch_compile`",
        "router_replay=True cannot replace routers that torch_compile=True compiled; set one of "
        "them to False."),
    "sampled old logps, processed": Combination(
        "`old_logps='rollout'`", "`logprobs_mode='processed'` with truncation or penalties",
        "old_logps='rollout' with logprobs_mode='processed' would compare log-probabilities after "
        "truncation or penalties with the loss's, which are before them; set "
        "sampling_mask='replay' or logprobs_mode='policy'."),
    "saved rollouts, strategy": Combination("`SavedRollouts`", "`use_strategy`",
        "a strategy decides what to sample, but saved rollouts are sampled already; use Plain(), "
        "or attach a RolloutConfig."),
    "served, tensor parallel": Combination("`serve()`", "a tensor-parallel model",
        "a tensor-parallel model cannot be served: a request would reach only one process of its "
        "group; leave tensor_parallel_size at 1 and load the model on one device, or serve with "
        "vLLM or SGLang."),
    "strategy, batch": Combination(
        "a strategy",
        "tensor parallelism, or rows that are no multiple of `num_generations`; one that samples "
        "ahead: tools, environments, a `rollout_func`; one that carries sequences: "
        "`release_cache='with_weights'`",
        "{name} does not work with {fault}; use Plain(), or change that setting."),
    "strategy, carried tokens": Combination(
        "a strategy that carries sequences", "`vllm_importance_sampling_correction` off, and RLOO",
        "{name} carries tokens of older policies, and without "
        "vllm_importance_sampling_correction=True the loss would treat them as the current "
        "policy's; set that (RLOO has no such setting), or old_logps='rollout'."),
    "strategy, retried groups": Combination(
        "a strategy with `max_retries` or `min_group_size`", "`GRPOTrainer`, `RLOOTrainer`",
        "{name} does not work with {trainer}: the trainer needs exactly num_generations "
        "completions of each prompt and scores them itself, so none can be retried or left out; "
        "use a GroupCollector in your own loop, or AsyncGRPOTrainer with AsyncRollouts."),
    "tensor parallel, shared": Combination(
        "`tensor_parallel_size` above 1", "`weight_sync='shared'`",
        "tensor_parallel_size={size} with weight_sync='shared': the training module is not split; "
        "leave weight_sync at 'auto', which makes a copy that is."),
    "token advantages, trainer": Combination(
        "`attach(token_advantages=...)`", "another trainer than GRPO",
        "token_advantages does not work with {trainer}, whose loss has one advantage per "
        "completion; leave it out."),
    "tool timeout, one thread": Combination("`tool_timeout_seconds`", "`concurrent_tools=False`",
        "tool_timeout_seconds={seconds} needs a separate thread for each conversation; set "
        "concurrent_tools=True."),
    "transformers' batching": Combination(
        "`attach`", "TRL with transformers' own continuous batching",
        "use_transformers_continuous_batching=True and cb_rollout both replace the trainer's "
        "generation; set it to False."),
}  # fmt: skip


def refused(name: str, /, **values: object) -> ConfigurationError:
    """Return the error for a pair of features; `values` fill the braces in its reason."""
    return ConfigurationError(COMBINATIONS[name].reason.format(**values))


def described(combination: Combination) -> str:
    """Return a reason for the documentation, with "..." in place of the run's values."""
    return combination.reason.format_map(defaultdict(lambda: "..."))
