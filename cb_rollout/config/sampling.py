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

# Logits divided by a lower temperature overflow float32, or become too coarse for meaningful
# log-probabilities.
MIN_TEMPERATURE = 1e-6

# It fits in float32, and far lower temperatures already make every token equally likely.
MAX_TEMPERATURE = 1e30

# Largest change of a logit: it fits in float32, and every logit is far smaller.
MAX_LOGIT_CHANGE = 1e30

# Names of vLLM and transformers for the same parameters.
SYNONYMS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
    "logprobs": "top_logprobs",
    "structured_outputs": "grammar",
    "lora_request": "adapter",
    "max_model_len": "RolloutConfig(max_model_len=...)",
    "num_blocks": "RolloutConfig(num_blocks=...)",
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


def _adapter_name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("is no name of an adapter; None is the adapters that are active")
    return value


_penalty = number(lambda v: abs(v) <= MAX_LOGIT_CHANGE, "is not finite; use 0 to switch it off")


@known_fields_only(InvalidRequestError, SYNONYMS)
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of one sequence.

    A field has exactly the value that you pass or its default, unless its help text says otherwise.

    Raises:
        InvalidRequestError: a field is unknown, or a value is out of its range.
    """

    temperature: float = setting(
        1.0,
        "Divides the logits; 0 is greedy decoding.",
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
        "Sample among the smallest set of most likely tokens whose probabilities sum to at least "
        "this; 1 is off.",
        number(lambda v: 0 < v <= 1, "is outside (0, 1]; use 1 to switch it off"),
    )
    min_p: float = setting(
        0.0,
        "Drop tokens whose probability is below this fraction of the most likely token's; 0 is "
        "off.",
        number(lambda v: 0 <= v <= 1, "is outside [0, 1]; use 0 to switch it off"),
    )
    do_sample: bool = setting(True, "False is greedy decoding, whatever the temperature.")
    repetition_penalty: float = setting(
        1.0,
        "Divides positive logits, and multiplies negative logits, of tokens that are in the "
        "prompt or the completion; values above 1 discourage repetition, 1 is off.",
        _factor,
    )
    presence_penalty: float = setting(
        0.0,
        ("Subtracted from the logit of each token that is in the completion; 0 is off."),
        _penalty,
    )
    frequency_penalty: float = setting(
        0.0,
        "Subtracted from a token's logit once per occurrence in the completion; 0 is off.",
        _penalty,
    )
    logit_bias: Mapping[int, float] | None = setting(
        None,
        "Maps token ids to values that are added to their logits; -inf forbids a token.",
        biases(MAX_LOGIT_CHANGE),
    )
    sequence_bias: Mapping[tuple[int, ...], float] | None = setting(
        None,
        "Maps token-id sequences to values that are added to the logit of the last token if the "
        "others come just before it; -inf forbids completing the sequence.",
        biases(MAX_LOGIT_CHANGE, of_sequences=True),
    )
    no_repeat_ngram_size: int = setting(
        0,
        "No sequence of this many tokens occurs twice in the prompt and completion; 0 is off.",
        integer(0, "; use 0 to switch it off"),
    )
    bad_words: tuple[tuple[int, ...], ...] = setting(
        (), "Token-id sequences that are never generated in full.", token_sequences
    )
    begin_suppress_tokens: tuple[int, ...] = setting(
        (), "Token ids that are never sampled as the first token.", token_ids
    )
    max_new_tokens: int | None = setting(
        None,
        "Maximum tokens to generate; None: as many as the model and the cache can hold.",
        integer(1, "; None is no limit"),
    )
    max_length: int | None = setting(
        None,
        "Maximum length, prompt included, if `max_new_tokens` is None; None: no limit.",
        integer(1, "; None is no limit"),
    )
    min_new_tokens: int = setting(
        0,
        "Minimum tokens to generate: no end-of-sequence token, stop token or stop string ends the "
        "sequence earlier.",
        integer(0, "; 0 is no minimum"),
    )
    min_length: int = setting(
        0,
        (
            "Minimum length, prompt included; until then, nothing ends the sequence, as with "
            "`min_new_tokens`."
        ),
        integer(0, "; 0 is no minimum"),
    )
    eos_token_id: int | tuple[int, ...] | None = setting(
        None,
        "Token id, or several, that ends the sequence and is kept in it. None: the model's own. "
        "-1: none.",
        _eos,
    )
    ignore_eos: bool = setting(False, "True: no end-of-sequence token ends the sequence.")
    forced_bos_token_id: tuple[int, ...] = setting(
        (),
        "Token id that is sampled first after a prompt of a single token; no effect after longer "
        "prompts.",
        token_ids,
    )
    forced_eos_token_id: tuple[int, ...] = setting(
        (), "Token id that is sampled as the last token that the maximum length allows.", token_ids
    )
    stop_token_ids: tuple[int, ...] = setting(
        (), "Additional token ids that end the sequence and are kept in it.", token_ids
    )
    stop: tuple[str, ...] = setting(
        (),
        "Strings that end the sequence when one occurs in the completion's text, in which special "
        "tokens appear as text. The string's tokens are kept. Needs a tokenizer.",
        strings,
    )
    top_logprobs: int = setting(
        0,
        "Number of most likely tokens to return with each sampled token; 0 is none.",
        integer(0, "; 0 is none"),
    )
    logits_processors: tuple[Any, ...] = setting(
        (),
        "transformers `LogitsProcessor`s, called separately for each sequence with its "
        "`input_ids` `[1, T]` and `scores` `[1, V]`, before the temperature. Do not keep state "
        "between calls, because calls for different sequences alternate.",
        callables,
    )
    grammar: Grammar | None = setting(  # noqa: RUF009  a field like the others
        None,
        ("A `cb_rollout.config.grammar.Grammar`, which decides which tokens may come next."),
        _grammar,
    )
    seed: int | None = setting(
        None,
        "Seed for sampling this sequence, whatever else is in the batch. None: derived from the "
        "config's seed, the rank and the call.",
        integer(-(2**63), most=2**64 - 1),
    )
    adapter: str | None = setting(
        None,
        "Name of the PEFT adapter that samples this sequence, whichever adapters the others name. "
        "None: the adapters that are active in the model.",
        _adapter_name,
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
        adjustments: dict[str, Any] = {}
        for field_ in _adjusting(type(self)):
            value = getattr(self, field_.name)
            if value != field_.default and value != {}:
                adjustments[field_.name] = value
        return adjustments

    @property
    def is_adjusted(self) -> bool:
        return bool(self.adjustments)

    @property
    def can_be_graphed(self) -> bool:
        """True: a CUDA graph can sample with these parameters."""
        if self.adapter is not None or self.top_logprobs:
            return False
        return _OF_FIRST_TOKEN.issuperset(self.adjustments)

    @property
    def is_processed(self) -> bool:
        """True: the sampled distribution differs from the policy's."""
        return self.is_truncated or self.is_adjusted

    def stop_tokens(self, model_eos: Iterable[int]) -> frozenset[int]:
        """Return the token ids that end a sequence, given the model's own end-of-sequence ids."""
        if self.ignore_eos:
            return _shared_set(self.stop_token_ids)
        eos: Any = self.eos_token_id
        if eos is None:
            eos = model_eos
        # A negative id means no end-of-sequence token.
        eos_ids = tuple(token for token in eos if token >= 0)
        return _shared_set(eos_ids + self.stop_token_ids)


# Requests share their few sets of stop tokens: even an empty set takes 216 bytes.
_shared_set = functools.lru_cache(maxsize=64)(frozenset[int])


# Parameters that leave the logits as they are; every other parameter changes them if it is set.
_UNADJUSTING = frozenset({
    "temperature", "do_sample", "top_k", "top_p", "min_p", "seed", "top_logprobs",
    "max_new_tokens", "max_length", "eos_token_id", "ignore_eos", "stop_token_ids", "stop",
    "adapter",
})  # fmt: skip

# Parameters that change the logits of a sequence's first token only, which a prefill samples.
_OF_FIRST_TOKEN = {"begin_suppress_tokens", "forced_bos_token_id"}


@functools.cache
def _adjusting(params_type: type[SamplingParams]) -> list[Field[Any]]:
    return [field for field in fields(params_type) if field.name not in _UNADJUSTING]


def sequences_per_input(num_return_sequences: int | None) -> int:
    """Return the number of sequences to sample per input; None: 1.

    Raises:
        InvalidRequestError: `num_return_sequences` is not a whole number of at least 1.
    """
    if num_return_sequences is None:
        return 1
    if not isinstance(num_return_sequences, int) or num_return_sequences < 1:
        raise InvalidRequestError(
            f"num_return_sequences={num_return_sequences!r} is not a whole number >= 1."
        )
    return num_return_sequences


def equal_group_warning(params: SamplingParams, num_return_sequences: int) -> str | None:
    """Return a warning if greedy decoding would make all sequences of an input equal; else None."""
    if num_return_sequences == 1 or not params.is_greedy:
        return None
    setting = "do_sample=False"
    if params.do_sample:
        setting = "temperature=0"
    return (
        f"greedy decoding ({setting}) makes all num_return_sequences={num_return_sequences} "
        "sequences of a prompt equal; pass sampling_params=SamplingParams(temperature=1.0), or a "
        "generation_config with do_sample=True."
    )


def resolved(
    params: Any,
    defaults: SamplingParams,
    max_new_tokens: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> SamplingParams:
    """Merge the parameters of a request: explicit arguments, then `params`, then `defaults`.

    Args:
        params: the request's parameters; None: all of `defaults`.
        defaults: fill only the length and the end-of-sequence ids that `params` leaves open.
        max_new_tokens: explicit length; it wins.
        eos_token_id: explicit end-of-sequence ids; they win.

    Raises:
        ConfigurationError: `params` is neither a `SamplingParams` nor None.
    """
    if not isinstance(params, SamplingParams | None):
        raise ConfigurationError(
            f"sampling_params is a {type(params).__name__}, {params!r}; pass a SamplingParams, or "
            "a transformers GenerationConfig as generation_config."
        )
    chosen = params or defaults
    if eos_token_id is None:
        eos_token_id = chosen.eos_token_id
    if eos_token_id is None:
        eos_token_id = defaults.eos_token_id
    max_length = chosen.max_length
    if max_new_tokens is None:
        says_length = defaults
        if chosen.max_new_tokens or chosen.max_length:
            says_length = chosen
        max_new_tokens = says_length.max_new_tokens
        max_length = says_length.max_length
    is_unchanged = (
        chosen.eos_token_id == eos_token_id
        and chosen.max_new_tokens == max_new_tokens
        and chosen.max_length == max_length
    )
    if is_unchanged:
        return chosen
    return replace(
        chosen, eos_token_id=eos_token_id, max_new_tokens=max_new_tokens, max_length=max_length
    )
