"""Define `SamplingParams`: how one sequence is sampled, with the range of every parameter.

Loads no torch.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from cb_rollout.config.checks import (
    biases,
    callables,
    check_fields,
    integer,
    known_fields_only,
    number,
    setting,
    strings,
    token_ids,
    token_sequences,
)
from cb_rollout.config.grammar import Grammar
from cb_rollout.errors import ConfigurationError, InvalidRequestError

# Logits divided by less overflow float32, or are too coarse for meaningful log-probabilities.
MIN_TEMPERATURE = 1e-6

# Float32 holds it, and every token is equally likely long before.
MAX_TEMPERATURE = 1e30

# Largest change of a logit: float32 holds it, and no logit comes near.
MAX_LOGIT_CHANGE = 1e30

# Names of vLLM and transformers for the same parameters.
SYNONYMS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
    "logprobs": "top_logprobs",
    "structured_outputs": "grammar",
    "n": "generate_batch(num_return_sequences=...)",
    "num_return_sequences": "generate_batch(num_return_sequences=...)",
}


def _grammar(value: Any) -> Grammar:
    if not isinstance(value, Grammar):
        raise ValueError(
            "has no matcher(); wrap it in a cb_rollout.config.grammar.Grammar, as "
            "cb_rollout.integrations.xgrammar does"
        )
    return value


def _eos(value: Any) -> tuple[int, ...]:
    ids = token_ids(value)
    if min(ids, default=0) < -1:
        raise ValueError("is below -1; -1 is none")
    return ids


_factor = number(
    lambda v: 1 / MAX_LOGIT_CHANGE <= v <= MAX_LOGIT_CHANGE,
    f"is outside [{1 / MAX_LOGIT_CHANGE:g}, {MAX_LOGIT_CHANGE:g}]; use 1 to switch it off",
)


_penalty = number(lambda v: abs(v) <= MAX_LOGIT_CHANGE, "is not finite; use 0 to switch it off")


@known_fields_only(InvalidRequestError, SYNONYMS)
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one sequence; complete in itself, except where a field says otherwise.

    Raises:
        InvalidRequestError: a field is unknown, or a value is out of its range.
    """

    temperature: float = setting(
        1.0,
        "Divides the logits; 0 is greedy.",
        number(
            lambda v: v == 0 or MIN_TEMPERATURE <= v <= MAX_TEMPERATURE,
            f"is outside [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}]; use 0 for greedy",
        ),
    )
    top_k: int = setting(
        0,
        "Sample among the k most likely tokens; 0 is off.",
        integer(0, "; use 0 to switch it off"),
    )
    top_p: float = setting(
        1.0,
        "Sample among the fewest tokens whose probabilities reach this sum; 1 is off.",
        number(lambda v: 0 < v <= 1, "is outside (0, 1]; use 1 to switch it off"),
    )
    min_p: float = setting(
        0.0,
        "Drop tokens less likely than this share of the most likely one; 0 is off.",
        number(lambda v: 0 <= v <= 1, "is outside [0, 1]; use 0 to switch it off"),
    )
    do_sample: bool = setting(True, "False is greedy, whatever the temperature.")
    repetition_penalty: float = setting(
        1.0,
        "Divides the positive and multiplies the negative logits of tokens that the prompt or the "
        "completion holds; above 1 discourages, 1 is off.",
        _factor,
    )
    presence_penalty: float = setting(
        0.0, "Subtracted from the logits of tokens that the completion holds; 0 is off.", _penalty
    )
    frequency_penalty: float = setting(
        0.0,
        "Subtracted from a token's logit as often as the completion holds it; 0 is off.",
        _penalty,
    )
    logit_bias: Mapping[int, float] | None = setting(
        None, "Added to the logits of the tokens named; -inf forbids one.", biases(MAX_LOGIT_CHANGE)
    )
    sequence_bias: Mapping[tuple[int, ...], float] | None = setting(
        None,
        "Added to the logit of the last token of each token-id sequence, after the tokens before "
        "it; -inf forbids to complete one.",
        biases(MAX_LOGIT_CHANGE, of_sequences=True),
    )
    no_repeat_ngram_size: int = setting(
        0,
        "No run of so many tokens comes twice in prompt and completion; 0 is off.",
        integer(0, "; use 0 to switch it off"),
    )
    bad_words: tuple[tuple[int, ...], ...] = setting(
        (), "Token-id sequences that are never completed.", token_sequences
    )
    begin_suppress_tokens: tuple[int, ...] = setting(
        (), "Tokens that are never sampled first.", token_ids
    )
    max_new_tokens: int | None = setting(
        None, "None: as many as the model and the cache can hold.", integer(1, "; None is no limit")
    )
    max_length: int | None = setting(
        None,
        "Longest sequence, prompt included, where `max_new_tokens` is None; None: no limit.",
        integer(1, "; None is no limit"),
    )
    min_new_tokens: int = setting(
        0,
        "No end-of-sequence or stop token, and no stop string, ends it before.",
        integer(0, "; 0 is no minimum"),
    )
    min_length: int = setting(
        0, "The same, with the prompt counted in.", integer(0, "; 0 is no minimum")
    )
    eos_token_id: int | tuple[int, ...] | None = setting(
        None, "Ends the sequence and is kept in it. None: the model's own. -1: none.", _eos
    )
    ignore_eos: bool = setting(False, "True: no end-of-sequence token ends it.")
    forced_bos_token_id: tuple[int, ...] = setting(
        (),
        "Sampled first after a prompt of a single token; without effect after longer ones.",
        token_ids,
    )
    forced_eos_token_id: tuple[int, ...] = setting(
        (), "Sampled as the last token that the length allows.", token_ids
    )
    stop_token_ids: tuple[int, ...] = setting(
        (), "End the sequence too, beside the end-of-sequence token; kept in it.", token_ids
    )
    stop: tuple[str, ...] = setting(
        (),
        "Strings that end the sequence once the completion's text holds one, special tokens "
        "counted as text; kept in the tokens. Needs a tokenizer.",
        strings,
    )
    top_logprobs: int = setting(
        0,
        "How many of the most likely tokens to deliver with each one sampled; 0 is none.",
        integer(0, "; 0 is none"),
    )
    logits_processors: tuple[Any, ...] = setting(
        (),
        "transformers `LogitsProcessor`s, called for each sequence by itself with its `input_ids` "
        "`[1, T]` and `scores` `[1, V]`, before the temperature. One that keeps state between "
        "calls would mix sequences.",
        callables,
    )
    grammar: Grammar | None = setting(  # noqa: RUF009  a field like the others
        None, "Says which tokens may come next: a `cb_rollout.config.grammar.Grammar`.", _grammar
    )
    seed: int | None = setting(
        None,
        "Fixes this sequence's random draws, whatever else is in the batch. None: drawn from the "
        "config's seed, the rank and the call.",
        integer(-(2**63), most=2**64 - 1),
    )

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequestError)

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        is_off = not self.top_k and self.top_p == 1 and not self.min_p
        return not (self.is_greedy or is_off)

    @property
    def is_penalized(self) -> bool:
        """True: a penalty for used tokens is on."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def adjustments(self) -> dict[str, Any]:
        """The parameters that change the logits before the temperature, by name."""
        values = ((f.name, getattr(self, f.name), f.default) for f in _adjusting(type(self)))
        return {name: value for name, value, off in values if value != off and value != {}}

    @property
    def is_adjusted(self) -> bool:
        return bool(self.adjustments)

    @property
    def can_be_graphed(self) -> bool:
        """True: a CUDA graph samples by these parameters."""
        return not (self.top_logprobs or {*self.adjustments} - _OF_FIRST_TOKEN)

    @property
    def is_processed(self) -> bool:
        """True: tokens are sampled from another distribution than the policy's."""
        return self.is_truncated or self.is_adjusted

    def stop_tokens(self, model_eos: Iterable[int]) -> frozenset[int]:
        """Return the token ids that end a sequence, given the model's own end-of-sequence ids."""
        eos: Any = model_eos if self.eos_token_id is None else self.eos_token_id
        named = () if self.ignore_eos else tuple(token for token in eos if token >= 0)
        return _shared_set(named + self.stop_token_ids)


# Requests share their few sets of stop tokens: even an empty one takes 216 bytes.
_shared_set = functools.lru_cache(maxsize=64)(frozenset[int])


# Parameters that leave the logits as they are; every other one changes them where it is set.
_UNADJUSTING = frozenset({
    "temperature", "do_sample", "top_k", "top_p", "min_p", "seed", "top_logprobs",
    "max_new_tokens", "max_length", "eos_token_id", "ignore_eos", "stop_token_ids", "stop",
})  # fmt: skip

# Parameters that change the logits of a sequence's first token alone, which a prefill samples.
_OF_FIRST_TOKEN = {"begin_suppress_tokens", "forced_bos_token_id"}


@functools.cache
def _adjusting(params_type: type[SamplingParams]) -> list[Field[Any]]:
    return [field for field in fields(params_type) if field.name not in _UNADJUSTING]


def equal_group_warning(params: SamplingParams, num_return_sequences: int) -> str | None:
    """Return why several sequences of one input would be equal; None: they are sampled."""
    if num_return_sequences == 1 or not params.is_greedy:
        return None
    setting = "temperature=0" if params.do_sample else "do_sample=False"
    return (
        f"num_return_sequences={num_return_sequences} of greedy decoding ({setting}) are equal; "
        "pass sampling_params=SamplingParams(temperature=1.0), or a generation_config with "
        "do_sample=True."
    )


def resolved(
    params: Any,
    defaults: SamplingParams,
    max_new_tokens: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> SamplingParams:
    """Merge the parameters of a request: explicit arguments, then `params`, then `defaults`.

    Of `defaults`, only the length and the end-of-sequence ids fill what `params` leaves open; with
    `params=None`, everything. Raises `ConfigurationError` if `params` is something else.
    """
    if not isinstance(params, SamplingParams | None):
        raise ConfigurationError(
            f"sampling_params is a {type(params).__name__}, {params!r}; pass a SamplingParams, or "
            "a transformers GenerationConfig as generation_config."
        )
    chosen = params or defaults
    if eos_token_id is None:
        eos_token_id = defaults.eos_token_id if chosen.eos_token_id is None else chosen.eos_token_id
    changes: dict[str, Any] = {"eos_token_id": eos_token_id, "max_new_tokens": max_new_tokens}
    if max_new_tokens is None:
        says_length = chosen if chosen.max_new_tokens or chosen.max_length else defaults
        changes["max_new_tokens"] = says_length.max_new_tokens
        changes["max_length"] = says_length.max_length
    if all(getattr(chosen, name) == value for name, value in changes.items()):
        return chosen
    return replace(chosen, **changes)
