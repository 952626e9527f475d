"""How one sequence is sampled, and how a `GenerationConfig` is read as that.

Owns the meaning and the ranges of sampling parameters. Loads no torch.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from cb_rollout.errors import ConfigurationError, InvalidRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one sequence is sampled; complete in itself, except where a field says otherwise.

    Raises:
        InvalidRequestError: a value is out of its range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Sample among the fewest tokens whose probabilities reach this sum; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 is off."""
    do_sample: bool = True
    """False is greedy, whatever the temperature."""
    max_new_tokens: int | None = None
    """None: as many as the model and the cache can hold."""
    max_length: int | None = None
    """Longest sequence, prompt included, where `max_new_tokens` is None; None: no limit."""
    eos_token_id: int | tuple[int, ...] | None = None
    """Ends the sequence and is kept in it. None: the model's own. -1: none."""
    ignore_eos: bool = False
    """True: no token ends the sequence."""
    stop_token_ids: tuple[int, ...] = ()
    """End the sequence too, beside the end-of-sequence token; kept in it."""
    seed: int | None = None
    """Fixes this sequence's random draws, whatever else is in the batch. None: drawn from the
    config's seed, the rank and the call."""

    def __post_init__(self) -> None:
        """Check every type and range."""
        for name, (is_whole, is_in_range, complaint) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPEN:
                continue
            kinds = int if is_whole else int | float
            if not isinstance(value, kinds) or isinstance(value, bool) or not is_in_range(value):
                raise InvalidRequestError(f"{name}={value!r} {complaint}.")
        for name in ("do_sample", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name}={getattr(self, name)!r} is not True or False.")
        for name in ("eos_token_id", "stop_token_ids"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, _token_ids(name, given))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return not self.do_sample or self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens can never be sampled (top-k, top-p or min-p is on)."""
        return not self.is_greedy and bool(self.top_k or self.top_p < 1 or self.min_p)

    def stop_tokens(self, model_eos: Iterable[int]) -> frozenset[int]:
        """The token ids that end a sequence, given the model's own end-of-sequence ids."""
        if self.ignore_eos:
            return frozenset(self.stop_token_ids)
        if self.eos_token_id is None:
            eos: Iterable[int] = model_eos
        elif isinstance(self.eos_token_id, int):
            eos = (self.eos_token_id,)
        else:
            eos = self.eos_token_id
        return frozenset(token for token in eos if token >= 0) | frozenset(self.stop_token_ids)


def _token_ids(name: str, given: Any) -> tuple[int, ...]:
    """One id or several, as plain numbers, whatever holds them."""
    try:
        with suppress(TypeError):
            return (operator.index(given),)
        return tuple(operator.index(token) for token in given)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name}={given!r} is not made of token ids.") from error


_OPEN = ("max_new_tokens", "max_length", "seed")
# None leaves these to be filled in.

_RANGES: dict[str, tuple[bool, Callable[[Any], bool], str]] = {
    "temperature": (
        False,
        lambda v: 0 <= v < math.inf,
        "is not a finite number >= 0; use 0 for greedy",
    ),
    "top_k": (True, lambda v: v >= 0, "is not a whole number >= 0; use 0 to switch it off"),
    "top_p": (False, lambda v: 0 < v <= 1, "is outside (0, 1]; use 1 to switch it off"),
    "min_p": (False, lambda v: 0 <= v <= 1, "is outside [0, 1]; use 0 to switch it off"),
    "max_new_tokens": (
        True,
        lambda v: v >= 1,
        "is not a whole number >= 1; None is no limit",
    ),
    "max_length": (True, lambda v: v >= 1, "is not a whole number >= 1; None is no limit"),
    "seed": (True, lambda _: True, "is not a whole number"),
}
# Whether it must be whole, its range, and what to say when it is neither.


HONOURED = (
    "temperature", "top_k", "top_p", "min_p", "do_sample", "max_new_tokens", "max_length",
    "eos_token_id",
)  # fmt: skip

INERT = {
    "num_return_sequences", "pad_token_id", "bos_token_id", "use_cache", "cache_implementation",
    "cache_config", "max_cache_len", "compile_config", "disable_compile", "low_memory",
    "early_stopping", "length_penalty", "transformers_version", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "prefill_chunk_size", "continuous_batching_config", "decoder_start_token_id", "use_mtp",
}  # fmt: skip
# Read elsewhere, or without effect on which tokens continuous batching samples.

NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "repetition_penalty": 1.0, "min_length": 0,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0,
    "encoder_no_repeat_ngram_size": 0,
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "diversity_penalty": 0.0,
    "guidance_scale": 1, "renormalize_logits": False, "remove_invalid_values": False,
    "token_healing": False, "is_assistant": False,
}  # fmt: skip
# The value at which each setting that is not honoured changes nothing.

ASSISTED_DECODING = (
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "max_matching_ngram_size",
)  # fmt: skip
# Tune a draft model that continuous batching does not have; they never change what is sampled.


def from_generation_config(generation_config: Any) -> SamplingParams:
    """The sampling that a transformers `GenerationConfig` asks for.

    Fields that are None are at rest: `do_sample=None` is greedy and `top_k=None` is off.

    Raises:
        ConfigurationError: a field asks for something that is not honoured.
        InvalidRequestError: a value is out of its range.
    """
    settings = {
        name: value
        for name, value in vars(generation_config).items()
        if value is not None and not name.startswith("_")
    }
    for name, value in settings.items():
        if name in HONOURED or name in INERT or name in ASSISTED_DECODING:
            continue
        if NEUTRAL.get(name) != value:
            raise ConfigurationError(
                f"GenerationConfig.{name}={value!r} is not honoured by cb_rollout; set it to "
                f"{NEUTRAL.get(name)!r} or use model.generate."
            )
    values = {name: settings[name] for name in HONOURED if name in settings}
    values.setdefault("do_sample", False)
    return SamplingParams(**values)


def resolved(
    params: SamplingParams | None,
    defaults: SamplingParams,
    max_new_tokens: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> SamplingParams:
    """What a request is sampled with: its own words first, then `params`, then `defaults`.

    `params` is complete in itself: only the length and the end of sequence, where it leaves them
    open, are taken from `defaults`. Without `params`, everything is.
    """
    chosen = params or defaults
    if eos_token_id is None:
        eos_token_id = defaults.eos_token_id if chosen.eos_token_id is None else chosen.eos_token_id
    if not isinstance(eos_token_id, int | None):
        eos_token_id = tuple(eos_token_id)
    if max_new_tokens is not None:
        return replace(chosen, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id)
    says_length = chosen if chosen.max_new_tokens or chosen.max_length else defaults
    return replace(
        chosen,
        max_new_tokens=says_length.max_new_tokens,
        max_length=says_length.max_length,
        eos_token_id=eos_token_id,
    )
