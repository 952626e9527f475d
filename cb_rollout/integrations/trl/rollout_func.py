"""Completions for a trainer's `rollout_func`, from what is attached to it or an engine of its own.

Without `attach` TRL's loss knows nothing of cb_rollout: prompts go in, tokens come out, and the
sampled log-probabilities are only passed on. Called by the trainer, on its thread; knows it by its
attributes only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from cb_rollout.config.hf import as_rollout_config
from cb_rollout.config.rollout import TRAINER_FIELDS, RolloutConfig, require_unused
from cb_rollout.config.sampling import SamplingParams, resolved
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl.backend import TrainerHooks, TrainerRollouts, create_generator
from cb_rollout.integrations.trl.callback import RolloutCallback
from cb_rollout.integrations.trl.truncation import unknown_end, warn_of_bias

OWN = "_cb_rollout_own"
# The trainer's attribute that holds the engine of its rollout functions, where none is attached.

BEYOND: dict[str, tuple[Any, ...]] = TRAINER_FIELDS | {"sampling_mask": ()}
# Settings that a rollout_func has no hand in; beside their defaults, what asks for nothing.


def make_rollout_func(
    sampling_params: SamplingParams | None = None, config: Any = None
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A `rollout_func` for `GRPOTrainer` that samples one completion of every prompt it is given.

    To be passed to the trainer as it is, or to be called, once or for each turn, by a function of
    one's own. TRL hands over each prompt as often as it wants completions of it; equal ones are
    computed once. Where the trainer is attached it generates through that; if not, through an
    engine that the trainer's functions share, made at the first call and synced once per optimizer
    step.

    Args:
        sampling_params: how to sample; None: as the trainer's config says.
        config: a `RolloutConfig`, or a transformers `ContinuousBatchingConfig`, of the engine where
            nothing is attached. None: the defaults. What concerns the loss (old log-probabilities,
            replay, verification) and records need `attach`.

    Returns:
        A function of prompts (texts, chats or token ids) and the trainer, which gives `prompt_ids`,
        `completion_ids` and `logprobs`, one list each a prompt.

    Raises:
        ConfigurationError: a setting that needs `attach`.
    """
    complaint = (
        "a rollout_func has no hand in that; call cb_rollout.attach(trainer, config) before train()"
    )
    require_unused(as_rollout_config(config), BEYOND, complaint)

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rollouts = getattr(trainer, "vllm_generation", None)
        is_attached = isinstance(rollouts, TrainerRollouts)
        if is_attached and config is not None:
            raise ConfigurationError(
                "the trainer is attached, so the config of make_rollout_func() would be ignored; "
                "give it to attach() alone."
            )
        if not is_attached:
            rollouts = _own_rollouts(trainer, config, sampling_params)
        ids = prompts
        if prompts and not all(_are_token_ids(prompt) for prompt in prompts):
            ids, _, _ = trainer._tokenize_prompts(prompts)
        outputs = (rollouts.sample if is_attached else rollouts.sample_alone)(ids, sampling_params)
        return {
            "prompt_ids": ids,
            "completion_ids": [output.generated_tokens for output in outputs],
            "logprobs": [output.logprobs for output in outputs],
        }

    return rollout


class OwnEngine(NamedTuple):
    """What the rollout functions of a trainer share."""

    rollouts: TrainerRollouts
    config: RolloutConfig
    """As it was given."""
    hooks: TrainerHooks
    callback: RolloutCallback


def end_own_engine(trainer: Any) -> None:
    """Close the engine of a trainer's rollout functions, if there is one."""
    own = vars(trainer).get(OWN)
    if own is not None:
        trainer.remove_callback(own.callback)
        own.hooks.restore()
        own.rollouts.generator.close()


def _own_rollouts(trainer: Any, config: Any, params: SamplingParams | None) -> TrainerRollouts:
    """Those of the trainer's own engine, which is made where there is none."""
    own = vars(trainer).get(OWN)
    if own is None:
        if trainer.tools:
            raise ConfigurationError(
                "with tools the trainer generates each later turn itself; call "
                "cb_rollout.attach(trainer) before train()."
            )
        generator = create_generator(trainer, config)
        rollouts, hooks = TrainerRollouts(trainer, generator), TrainerHooks(trainer)
        callback = RolloutCallback(rollouts, None)
        own = OwnEngine(rollouts, as_rollout_config(config), hooks, callback)
        hooks.put(OWN, own)
        hooks.put("_last_loaded_step", -1)
        trainer.add_callback(callback)
        warn_of_bias(trainer, generator.config, resolved(params, generator.manager.defaults))
    if own.config != as_rollout_config(config):
        raise ConfigurationError(
            "two functions of make_rollout_func() share the trainer's engine and have two configs; "
            "give both the same."
        )
    ended_by = unknown_end(trainer, resolved(params, own.rollouts.generator.manager.defaults))
    if trainer.mask_truncated_completions and ended_by:
        raise ConfigurationError(
            f"mask_truncated_completions=True would leave out completions that {ended_by} ended, "
            "which only an attached trainer knows; call cb_rollout.attach(trainer) before train()."
        )
    return own.rollouts


def _are_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
