"""Generate completions for a `rollout_func`, from the attached engine or its own.

Without `attach` TRL's loss does not use the sampled log-probabilities; they are only passed on.
Called by the trainer, on its thread.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from cb_rollout.config.hf import as_rollout_config
from cb_rollout.config.rollout import TRAINER_FIELDS, RolloutConfig, require_unused
from cb_rollout.config.sampling import SamplingParams, resolved
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl.backend import (
    GenerationBackend,
    attached_backend,
    create_generator,
)
from cb_rollout.integrations.trl.guard import warn_of_bias
from cb_rollout.integrations.trl.scoring import unknown_end

# The trainer's attribute that holds the engine of its rollout functions, where none is attached.
OWN = "_cb_rollout_own"

# Settings that need `attach`, each with its values that ask for nothing, besides the default.
NEED_ATTACH: dict[str, tuple[Any, ...]] = TRAINER_FIELDS | {
    "sampling_mask": (),
    "router_replay": (),
}


def make_rollout_func(
    sampling_params: SamplingParams | None = None, config: Any = None
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Make a `rollout_func` for `GRPOTrainer` that samples one completion of every prompt.

    Pass it to the trainer as it is, or call it, once or for each turn, from a function of your own.
    TRL repeats each prompt for every completion it wants; equal prompts are prefilled once. An
    attached trainer generates through its engine. Otherwise the trainer's functions share an engine
    that is made at the first call and synced once per optimizer step.

    Args:
        sampling_params: None: the trainer's.
        config: a `RolloutConfig`, or a transformers `ContinuousBatchingConfig`, of the engine where
            nothing is attached. None: the defaults. Settings of the loss (old log-probabilities,
            replay, verification) and of records need `attach`.

    Returns:
        A function of prompts (texts, chats or token ids) and the trainer, which returns
        `prompt_ids`, `completion_ids` and `logprobs`, one list for each prompt.

    Raises:
        ConfigurationError: a setting that needs `attach`.
    """
    complaint = (
        "a rollout_func cannot apply it; call cb_rollout.attach(trainer, config) before train()"
    )
    require_unused(as_rollout_config(config), NEED_ATTACH, complaint)

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        backend = attached_backend(trainer)
        if backend is None:
            sample = _own_backend(trainer, config, sampling_params).sample_rollout
        elif config is None:
            sample = backend.sample
        else:
            raise ConfigurationError(
                "the trainer is attached, so the config of make_rollout_func() would be ignored; "
                "give it to attach() alone."
            )
        ids = prompts
        if prompts and not all(_are_token_ids(prompt) for prompt in prompts):
            ids, _, _ = trainer._tokenize_prompts(prompts)
        outputs = sample(ids, sampling_params)
        return {
            "prompt_ids": ids,
            "completion_ids": [output.generated_tokens for output in outputs],
            "logprobs": [output.logprobs for output in outputs],
        }

    return rollout


class OwnEngine(NamedTuple):
    """The engine that a trainer's rollout functions share."""

    backend: GenerationBackend
    config: RolloutConfig
    """As it was given."""


def end_own_engine(trainer: Any) -> None:
    """Close the engine of a trainer's rollout functions, if there is one."""
    if own := vars(trainer).get(OWN):
        own.backend.close()


def _own_backend(trainer: Any, config: Any, params: SamplingParams | None) -> GenerationBackend:
    own = vars(trainer).get(OWN)
    if own is None:
        if trainer.tools:
            raise ConfigurationError(
                "with tools the trainer generates each later turn itself; call "
                "cb_rollout.attach(trainer) before train()."
            )
        generator = create_generator(trainer, config)
        own = OwnEngine(GenerationBackend(trainer, generator), as_rollout_config(config))
        own.backend.overrides.set(**{OWN: own, "_last_loaded_step": -1})
        trainer.add_callback(own.backend)
        warn_of_bias(trainer, generator.config, resolved(params, generator.manager.defaults))
    if own.config != as_rollout_config(config):
        raise ConfigurationError(
            "two functions of make_rollout_func() share the trainer's engine and have two configs; "
            "give both the same."
        )
    ended_by = unknown_end(trainer, resolved(params, own.backend.generator.manager.defaults))
    if trainer.mask_truncated_completions and ended_by:
        raise ConfigurationError(
            f"mask_truncated_completions=True would leave out completions that {ended_by} ended, "
            "which only an attached trainer knows; call cb_rollout.attach(trainer) before train()."
        )
    return own.backend


def _are_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
