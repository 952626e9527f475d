"""Whether what is sampled is what the loss recomputes, and what to say where it is not.

The loss of TRL 1.16 takes a log-softmax of logits/temperature over the whole vocabulary. Knows the
trainer by its attributes only.
"""

import math
import warnings
from typing import Any

from cb_rollout.choices import LogprobsMode, OldLogps, SamplingMask
from cb_rollout.config import RolloutConfig
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trainer_truncation import unknown_end
from cb_rollout.sampling_params import SamplingParams

STACKLEVEL = 3
# Warnings point at the caller of attach().


def are_comparable(config: RolloutConfig, params: SamplingParams) -> bool:
    """Whether sampled and recomputed log-probabilities are of one distribution."""
    if config.sampling_mask == SamplingMask.REPLAY:
        return True
    return config.logprobs_mode == LogprobsMode.POLICY or not params.is_processed


def require_known_distribution(trainer: Any, config: RolloutConfig, params: SamplingParams) -> None:
    """Refuse settings under which the old log-probabilities would be of another distribution."""
    if config.sampling_mask == SamplingMask.REPLAY and params.is_adjusted:
        raise ConfigurationError(
            "sampling_mask='replay' knows top_k, top_p and min_p, not penalties, biases or forced "
            "tokens; take repetition_penalty and the like out of the trainer's settings and "
            "generation_kwargs, or set sampling_mask='ignore'."
        )
    if config.old_logps == OldLogps.ROLLOUT and not are_comparable(config, params):
        raise ConfigurationError(
            "old_logps='rollout' with logprobs_mode='processed' would hold log-probabilities after "
            "truncation or penalties against the loss's, which are before; set "
            "sampling_mask='replay' or logprobs_mode='policy'."
        )
    is_rloo = not hasattr(trainer, "rollout_func")
    ended_by = unknown_end(trainer, params)
    if trainer.mask_truncated_completions and is_rloo and ended_by:
        raise ConfigurationError(
            f"mask_truncated_completions=True would leave out completions that {ended_by} ended: "
            "RLOO's trainer takes for whole only what ends in its own end-of-sequence token, and "
            "computes old log-probabilities and rewards from that; leave it False, or take "
            "stop_strings and eos_token_id out of generation_kwargs."
        )


def warn_of_bias(trainer: Any, config: RolloutConfig, params: SamplingParams) -> None:
    """Say, with numbers, where the loss's policy is not what its samples come from."""
    if params.temperature != trainer.temperature:
        warnings.warn(
            f"generation_kwargs sample at temperature={params.temperature:g}, and the loss divides "
            f"logits by {trainer.temperature:g}: its ratios are of another policy. Set temperature "
            "in the trainer's config instead.",
            stacklevel=STACKLEVEL,
        )
    if not params.is_truncated or config.sampling_mask == SamplingMask.REPLAY:
        return
    settings = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    rest = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    said = ", ".join(f"{k}={v:g}" for k, v in settings.items() if v != rest[k])
    length = trainer.args.max_completion_length
    bound = ""
    if params.top_p < 1 and not params.top_k and not params.min_p:
        lowest = length * math.log(params.top_p)
        bound = f" (at least {params.top_p:g} a token; e**{lowest:.0f} over {length} tokens)"
    effect = "nothing corrects for it"
    corrects = getattr(trainer, "vllm_importance_sampling_correction", False)
    if corrects and config.logprobs_mode == LogprobsMode.PROCESSED:
        effect = "the importance-sampling correction multiplies that mass into the loss"
    warnings.warn(
        f"{said}: completions are sampled from part of the distribution{bound}, the loss is of all "
        f"of it; {effect}. rollout/log_kept_mass says how much is cut. Set sampling_mask='replay' "
        "for exact ratios, or switch truncation off.",
        stacklevel=STACKLEVEL,
    )
