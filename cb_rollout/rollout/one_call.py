"""`generate_batch`, the reference's one function."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from cb_rollout.config.hf import as_rollout_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.rollout.prompts import Prompt
from cb_rollout.types import GenerationOutput

KEPT = "_cb_rollout_generator"
# The model's attribute that holds a kept generator.


class _Kept:
    """Holds a generator where the model is copied or pickled: the copy gets an empty one."""

    def __init__(self, generator: RolloutGenerator | None = None) -> None:
        self.generator = generator

    def __reduce__(self) -> tuple[type["_Kept"], tuple[()]]:
        return _Kept, ()


def generate_batch(
    model: torch.nn.Module,
    inputs: Sequence[Prompt],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = True,
    persistent_manager: bool = False,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Sample completions of many prompts together, in one call.

    Args:
        model: a causal language model, wrapped or not.
        inputs: lists of token ids.
        generation_config: how to sample; None: the model's own.
        continuous_batching_config: a `RolloutConfig`, or transformers' own.
        record_timestamps: note when each token was sampled.
        progress_bar: show sequences done and tokens per second.
        persistent_manager: keep the manager on the model for the next call. The weights may have
            changed by then, so no key of an earlier call is read.
        **kwargs: further arguments of `RolloutGenerator.generate_batch`.

    Returns:
        Outputs by request id; see `RolloutGenerator.generate_batch`.
    """
    config = as_rollout_config(continuous_batching_config)
    with (
        nullcontext(_kept_generator(model, config))
        if persistent_manager
        else RolloutGenerator(model, config)
    ) as generator:
        return generator.generate_batch(
            inputs,
            generation_config,
            record_timestamps=record_timestamps,
            progress_bar=progress_bar,
            **kwargs,
        )


def _kept_generator(model: torch.nn.Module, config: RolloutConfig) -> RolloutGenerator:
    """The generator kept on the model, if it has the same config, else a new one."""
    kept = vars(model).setdefault(KEPT, _Kept())
    if kept.generator is not None and kept.generator.config == config:
        kept.generator.sync_weights()
    else:
        if kept.generator is not None:
            kept.generator.close()
        kept.generator = RolloutGenerator(model, config)
    return kept.generator
