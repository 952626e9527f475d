"""Engine settings and model for an `AsyncGRPOConfig`, which is known by its fields only."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cb_rollout.config.combinations import refused
from cb_rollout.config.enums import RolloutDtype, WeightSync
from cb_rollout.config.hf import as_trainers_config
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl.images import images_in
from cb_rollout.rollout.generator import RolloutGenerator


def require_settings(args: Any, in_flight: str, is_strategy_ignored: bool = False) -> None:
    """Refuse settings that need a server, or that would be ignored."""
    if is_strategy_ignored:
        raise refused("async trainer, strategy and tools")
    if args.token_budget is None:
        raise ConfigurationError(
            "token_budget=None asks a vLLM server for its limit; set it to the most tokens of one "
            "forward, or to 0 for batches of per_device_train_batch_size completions."
        )
    if in_flight not in ("keep", "recompute"):
        raise ConfigurationError(f"in_flight={in_flight!r} is not 'keep' or 'recompute'.")
    if not args.temperature > 0:
        raise ConfigurationError(
            f"temperature={args.temperature}: the completions of a group would all be the same; "
            "raise it."
        )


def samples_per_step(args: Any) -> int:
    """Return the completions that an optimizer step trains on, on all processes."""
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size


def max_outstanding(args: Any) -> int:
    """Return the most completions in flight or queued, so that none is too old when trained on."""
    limit = max(1, args.max_staleness) * samples_per_step(args)
    if limit < args.num_generations:
        raise ConfigurationError(
            f"a group of num_generations={args.num_generations} is more than "
            f"max_staleness={args.max_staleness} steps of {samples_per_step(args)} completions, so "
            "part of it would be too old; raise gradient_accumulation_steps or max_staleness."
        )
    return limit


def require_data(train_dataset: Any, reward_funcs: Any) -> None:
    """Refuse data and rewards that would fail at the first completion."""
    for reward in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if not callable(reward):
            raise ConfigurationError(
                f"reward_funcs holds {reward!r:.60}, which cannot be called; pass functions of "
                "prompts and completions."
            )
    if not isinstance(train_dataset, Iterable):
        raise ConfigurationError(
            f"train_dataset is a {type(train_dataset).__name__}; pass the trainer's own."
        )
    columns = getattr(train_dataset, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise ConfigurationError(
            f"train_dataset has no column 'prompt', only {', '.join(columns)}; rename the one that "
            "holds it."
        )
    # An iterator's first row would be lost.
    reads_row = not isinstance(train_dataset, Iterator)
    if where := images_in(train_dataset, "train_dataset", reads_row=reads_row):
        raise refused("async trainer, images", where=where)


def create_generator(
    model: str | torch.nn.Module, args: Any, config: Any, tokenizer: Any
) -> RolloutGenerator:
    """Create a generator on its own copy of the weights, on the trainer's device, in its dtype."""
    settings = as_trainers_config(config, args.seed)
    if settings.weight_sync == WeightSync.COPY:
        raise refused("async trainer, copy")
    if settings.router_replay:
        raise refused("async trainer, router replay")
    dtype = settings.rollout_dtype
    if dtype == RolloutDtype.AUTO and (args.bf16 or args.fp16):
        dtype = RolloutDtype.BFLOAT16 if args.bf16 else RolloutDtype.FLOAT16
    settings = replace(settings, weight_sync=WeightSync.SHARED, rollout_dtype=dtype)
    if not isinstance(model, torch.nn.Module):
        loading = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
        loading |= args.model_init_kwargs or {}
        model = AutoModelForCausalLM.from_pretrained(model, **loading)
    return RolloutGenerator(model.to(args.device), settings, tokenizer=tokenizer)
