"""Tinker's losses, each a sum over the tokens of the data.

N: tokens of a datum. `ratio` is a token's probability under the model, divided by the probability
with which it was sampled.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cb_rollout.errors import InvalidRequestError

Inputs = Mapping[str, torch.Tensor]
Settings = Mapping[str, Any]
Loss = Callable[[torch.Tensor, Inputs, Settings], torch.Tensor]
"""Takes the targets' log-probabilities (N,), a datum's inputs and settings; returns (N,), the loss
of each token."""


def cross_entropy(logprobs_N: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Negative log-likelihood, weighted by `weights`; without `weights` each token counts once."""
    losses_N = -logprobs_N
    return losses_N * inputs["weights"] if "weights" in inputs else losses_N


def importance_sampling(
    logprobs_N: torch.Tensor, inputs: Inputs, settings: Settings
) -> torch.Tensor:
    """Policy gradient with importance sampling: `-ratio * advantages`."""
    ratios_N = (logprobs_N - inputs["logprobs"]).exp()
    return -ratios_N * inputs["advantages"]


def ppo(logprobs_N: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """PPO's clipped objective (Schulman et al. 2017)."""
    ratios_N = (logprobs_N - inputs["logprobs"]).exp()
    clipped_N = _clipped(ratios_N, settings)
    advantages_N = inputs["advantages"]
    return -torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)


def cispo(logprobs_N: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """CISPO (MiniMax 2025): the clipped ratio is a constant weight of the policy gradient."""
    ratios_N = (logprobs_N - inputs["logprobs"]).exp()
    weights_N = _clipped(ratios_N, settings).detach()
    return -weights_N * inputs["advantages"] * logprobs_N


def dro(logprobs_N: torch.Tensor, inputs: Inputs, settings: Settings) -> torch.Tensor:
    """Direct reward optimisation: a quadratic penalty with weight `beta` limits policy changes."""
    log_ratios_N = logprobs_N - inputs["logprobs"]
    penalty_N = 0.5 * float(settings.get("beta", 0.05)) * log_ratios_N.square()
    return -(logprobs_N * inputs["advantages"] - penalty_N)


def _clipped(ratios_N: torch.Tensor, settings: Settings) -> torch.Tensor:
    low, high = clip_range(settings)
    return ratios_N.clamp(low, high)


def clip_range(settings: Settings) -> tuple[float, float]:
    """Return the lowest and the highest ratio that is not clipped."""
    low = float(settings.get("clip_low_threshold", 0.8))
    high = float(settings.get("clip_high_threshold", 1.2))
    return low, high


_SAMPLED = ("logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")

LOSSES: dict[str, tuple[Loss, tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (cross_entropy, (), ()),
    "importance_sampling": (importance_sampling, _SAMPLED, ()),
    "ppo": (ppo, _SAMPLED, _CLIP),
    "cispo": (cispo, _SAMPLED, _CLIP),
    "dro": (dro, _SAMPLED, ("beta",)),
}
"""Each loss by its name, with the names of its inputs and of its settings."""


def checked_loss(
    name: str, settings: Settings, inputs: Inputs, num_tokens: int, index: int
) -> Loss:
    """Return the loss with a name, after checking that a datum's inputs fit it.

    Args:
        name: the client's name for the loss.
        settings: the client's settings of the loss.
        inputs: the datum's inputs.
        num_tokens: number of the datum's input tokens.
        index: the datum's index, for errors.

    Raises:
        InvalidRequestError: there is no such loss or setting, a setting is out of its range, or an
            input is missing, has another shape or dtype, or is not finite.
    """
    if name not in LOSSES:
        raise InvalidRequestError(
            f"loss_fn={name!r} is not computed here; use one of {', '.join(LOSSES)}, or "
            "forward_backward_custom, whose loss runs in the client."
        )
    loss, needed, known = LOSSES[name]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise InvalidRequestError(
            f"loss_fn_config has {unknown[0]!r}, which {name} does not take; it takes "
            f"{', '.join(known) or 'none'}."
        )
    _check_settings(settings)
    for input_name in ("target_tokens", *needed):
        values = inputs.get(input_name)
        if values is None:
            raise InvalidRequestError(
                f"datum {index} has no {input_name!r} among its loss_fn_inputs, which {name} needs."
            )
        if tuple(values.shape) != (num_tokens,):
            raise InvalidRequestError(
                f"datum {index}: {input_name} has the shape {tuple(values.shape)}; it takes one "
                f"number for each of the {num_tokens} input tokens."
            )
    if inputs["target_tokens"].is_floating_point():
        raise InvalidRequestError(
            f"datum {index}: target_tokens are {inputs['target_tokens'].dtype}; send token ids as "
            "int64."
        )
    for input_name, values in inputs.items():
        if not values.isfinite().all():
            raise InvalidRequestError(
                f"datum {index}: {input_name} holds a number that is not finite, which would make "
                "every weight of the adapter NaN."
            )
    return loss


def _check_settings(settings: Settings) -> None:
    """Raise `InvalidRequestError` for settings with which no loss can be computed."""
    for setting, value in settings.items():
        if isinstance(value, str) or not math.isfinite(value):
            raise InvalidRequestError(
                f"loss_fn_config has {setting}={value!r}; send a finite number."
            )
    low, high = clip_range(settings)
    if low > high:
        raise InvalidRequestError(
            f"clip_low_threshold={low} is above clip_high_threshold={high}; ratios are clipped to "
            "the range from the one to the other."
        )
