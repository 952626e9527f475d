"""How one sequence is sampled.

Owns the meaning and the ranges of sampling parameters. Loads no torch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cb_rollout.config import validation as values
from cb_rollout.config.grammar import Grammar
from cb_rollout.config.validation import known_fields_only
from cb_rollout.errors import ConfigurationError, InvalidRequestError

LEAST_TEMPERATURE = 1e-6
# Logits divided by less overflow float32, or are too coarse for log-probabilities to mean anything.

LARGEST_CHANGE = 1e30
# Of a logit: float32 holds it, and no logit comes near.

NUM_SHARED_SETS = 64
# Of stop tokens: few are in use at once, and each may be large.

NEIGHBOURS_WORDS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
    "sequence_bias": "logit_bias",
    "logprobs": "top_logprobs",
    "structured_outputs": "grammar",
    "n": "generate_batch(num_return_sequences=...)",
    "num_return_sequences": "generate_batch(num_return_sequences=...)",
}
# What vLLM and transformers call the same thing.


def _setting(default: Any, help_text: str, counterpart: str = "-") -> Any:
    """A field with its help text, and the `GenerationConfig` field that is read as it."""
    metadata = {"help": help_text, "counterpart": counterpart}
    # A dict has no hash; equal params hash alike without the fields that are left open.
    return dataclasses.field(default=default, metadata=metadata, hash=default is not None)


@known_fields_only(InvalidRequestError, NEIGHBOURS_WORDS)
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one sequence is sampled; complete in itself, except where a field says otherwise.

    Raises:
        InvalidRequestError: a field is unknown, or a value is out of its range.
    """

    temperature: float = _setting(1.0, "Divides the logits; 0 is greedy.", "temperature")
    top_k: int = _setting(0, "Sample among the k most likely tokens; 0 is off.", "top_k")
    top_p: float = _setting(
        1.0, "Sample among the fewest tokens whose probabilities reach this sum; 1 is off.", "top_p"
    )
    min_p: float = _setting(
        0.0, "Drop tokens less likely than this share of the most likely one; 0 is off.", "min_p"
    )
    do_sample: bool = _setting(True, "False is greedy, whatever the temperature.", "do_sample")
    repetition_penalty: float = _setting(
        1.0,
        "Divides the positive and multiplies the negative logits of tokens that the prompt or the "
        "completion holds; above 1 discourages, 1 is off.",
        "repetition_penalty",
    )
    presence_penalty: float = _setting(
        0.0, "Subtracted from the logits of tokens that the completion holds; 0 is off."
    )
    frequency_penalty: float = _setting(
        0.0, "Subtracted from a token's logit as often as the completion holds it; 0 is off."
    )
    logit_bias: Mapping[int, float] | None = _setting(
        None,
        "Added to the logits of the tokens named; -inf forbids one.",
        "sequence_bias (single tokens), suppress_tokens",
    )
    bad_words: tuple[tuple[int, ...], ...] = _setting(
        (), "Token-id sequences that are never completed.", "bad_words_ids"
    )
    begin_suppress_tokens: tuple[int, ...] = _setting(
        (), "Tokens that are never sampled first.", "begin_suppress_tokens"
    )
    max_new_tokens: int | None = _setting(
        None, "None: as many as the model and the cache can hold.", "max_new_tokens"
    )
    max_length: int | None = _setting(
        None,
        "Longest sequence, prompt included, where `max_new_tokens` is None; None: no limit.",
        "max_length",
    )
    min_new_tokens: int = _setting(
        0, "No end-of-sequence or stop token, and no stop string, ends it before.", "min_new_tokens"
    )
    min_length: int = _setting(0, "The same, with the prompt counted in.", "min_length")
    eos_token_id: int | tuple[int, ...] | None = _setting(
        None,
        "Ends the sequence and is kept in it. None: the model's own. -1: none.",
        "eos_token_id",
    )
    ignore_eos: bool = _setting(False, "True: no end-of-sequence token ends it.")
    forced_eos_token_id: tuple[int, ...] = _setting(
        (), "Sampled as the last token that the length allows.", "forced_eos_token_id"
    )
    stop_token_ids: tuple[int, ...] = _setting(
        (), "End the sequence too, beside the end-of-sequence token; kept in it."
    )
    stop: tuple[str, ...] = _setting(
        (),
        "Strings that end the sequence once the completion's text holds one, special tokens "
        "counted as text; kept in the tokens. Needs a tokenizer.",
        "stop_strings",
    )
    top_logprobs: int = _setting(
        0, "How many of the most likely tokens to deliver with each one sampled; 0 is none."
    )
    logits_processors: tuple[Any, ...] = _setting(
        (),
        "transformers `LogitsProcessor`s, called for each sequence by itself with its `input_ids` "
        "`[1, T]` and `scores` `[1, V]`, before the temperature. One that keeps state between "
        "calls would mix sequences.",
    )
    grammar: Grammar | None = _setting(  # noqa: RUF009  a field like the others
        None, "Says which tokens may come next: a `cb_rollout.config.grammar.Grammar`."
    )
    seed: int | None = _setting(
        None,
        "Fixes this sequence's random draws, whatever else is in the batch. None: drawn from the "
        "config's seed, the rank and the call.",
    )

    def __post_init__(self) -> None:
        """Check every type and range, and keep plain numbers."""
        for name, plain in _READERS.items():
            value, default = getattr(self, name), _DEFAULTS[name]
            if value is default:
                continue
            is_empty = value is None and default == ()
            object.__setattr__(self, name, default if is_empty else plain(name, value))
        if min((self.eos_token_id or (0,)), default=0) < -1:  # type: ignore[arg-type]
            raise InvalidRequestError(f"eos_token_id={self.eos_token_id} is below -1; -1 is none.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequestError(
                f"grammar={self.grammar!r} has no matcher(); wrap it in a "
                "cb_rollout.config.grammar.Grammar, as cb_rollout.integrations.xgrammar does."
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return not self.do_sample or self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens can never be sampled (top-k, top-p or min-p is on)."""
        return not self.is_greedy and bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def is_penalized(self) -> bool:
        """Whether tokens become less or more likely by having been used."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_adjusted(self) -> bool:
        """Whether the logits are changed before the temperature."""
        is_plain = self.grammar is None and not any(getattr(self, name) for name in _ADJUSTING)
        return self.is_penalized or not is_plain

    @property
    def is_processed(self) -> bool:
        """Whether tokens are sampled from another distribution than the policy's."""
        return self.is_truncated or self.is_adjusted

    def stop_tokens(self, model_eos: Iterable[int]) -> frozenset[int]:
        """The token ids that end a sequence, given the model's own end-of-sequence ids."""
        eos: Any = model_eos if self.eos_token_id is None else self.eos_token_id
        named = () if self.ignore_eos else tuple(token for token in eos if token >= 0)
        return _shared_set(named + self.stop_token_ids)


@functools.lru_cache(maxsize=NUM_SHARED_SETS)
def _shared_set(tokens: tuple[int, ...]) -> frozenset[int]:
    """One set for all requests that name the same tokens: even an empty one takes 216 bytes."""
    return frozenset(tokens)


_ADJUSTING = (
    "logit_bias", "bad_words", "begin_suppress_tokens", "forced_eos_token_id", "min_new_tokens",
    "min_length", "logits_processors",
)  # fmt: skip
# Each changes the logits unless it is empty.


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}

_FROM_0, _FROM_1 = "is not a whole number >= 0", "is not a whole number >= 1"

_SOME_CHANGE = f"is outside [{1 / LARGEST_CHANGE:g}, {LARGEST_CHANGE:g}]"


def _real(is_in_range: Callable[[float], bool], complaint: str) -> Callable[[str, Any], float]:
    return functools.partial(values.real, is_in_range=is_in_range, complaint=complaint)


def _whole(is_in_range: Callable[[int], bool], complaint: str) -> Callable[[str, Any], int]:
    return functools.partial(values.whole, is_in_range=is_in_range, complaint=complaint)


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _real(
        lambda v: v == 0 or LEAST_TEMPERATURE <= v < math.inf,
        f"is not a finite number >= {LEAST_TEMPERATURE:g}; use 0 for greedy",
    ),
    "top_k": _whole(lambda v: v >= 0, f"{_FROM_0}; use 0 to switch it off"),
    "top_p": _real(lambda v: 0 < v <= 1, "is outside (0, 1]; use 1 to switch it off"),
    "min_p": _real(lambda v: 0 <= v <= 1, "is outside [0, 1]; use 0 to switch it off"),
    "do_sample": values.flag,
    "repetition_penalty": _real(
        lambda v: 1 / LARGEST_CHANGE <= v <= LARGEST_CHANGE,
        f"{_SOME_CHANGE}; use 1 to switch it off",
    ),
    "presence_penalty": _real(
        lambda v: abs(v) <= LARGEST_CHANGE, "is not finite; use 0 to switch it off"
    ),
    "frequency_penalty": _real(
        lambda v: abs(v) <= LARGEST_CHANGE, "is not finite; use 0 to switch it off"
    ),
    "logit_bias": functools.partial(values.biases, largest=LARGEST_CHANGE),
    "bad_words": values.token_sequences,
    "begin_suppress_tokens": values.token_ids,
    "max_new_tokens": _whole(lambda v: v >= 1, f"{_FROM_1}; None is no limit"),
    "max_length": _whole(lambda v: v >= 1, f"{_FROM_1}; None is no limit"),
    "min_new_tokens": _whole(lambda v: v >= 0, f"{_FROM_0}; 0 is no minimum"),
    "min_length": _whole(lambda v: v >= 0, f"{_FROM_0}; 0 is no minimum"),
    "eos_token_id": values.token_ids,
    "ignore_eos": values.flag,
    "forced_eos_token_id": values.token_ids,
    "stop_token_ids": values.token_ids,
    "stop": values.texts,
    "top_logprobs": _whole(lambda v: v >= 0, f"{_FROM_0}; 0 is none"),
    "logits_processors": values.callables,
    "seed": _whole(lambda _: True, "is not a whole number"),
}
# What makes each field plain, or says what is wrong with it; a default is both already.


def resolved(
    params: Any,
    defaults: SamplingParams,
    max_new_tokens: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> SamplingParams:
    """What a request is sampled with: its own words first, then `params`, then `defaults`.

    `params`, a `SamplingParams`, is complete in itself: only the length and the end of sequence,
    where it leaves them open, are taken from `defaults`. Where it is None, everything is.

    Raises:
        ConfigurationError: `params` is something else.
    """
    if not isinstance(params, SamplingParams | None):
        raise ConfigurationError(
            f"sampling_params is a {type(params).__name__}, {params!r}; pass a SamplingParams, or "
            "a transformers GenerationConfig as generation_config."
        )
    chosen = params or defaults
    if eos_token_id is None:
        eos_token_id = defaults.eos_token_id if chosen.eos_token_id is None else chosen.eos_token_id
    given: dict[str, Any] = {"eos_token_id": eos_token_id, "max_new_tokens": max_new_tokens}
    if max_new_tokens is None:
        says_length = chosen if chosen.max_new_tokens or chosen.max_length else defaults
        given["max_new_tokens"] = says_length.max_new_tokens
        given["max_length"] = says_length.max_length
    if all(getattr(chosen, name) == value for name, value in given.items()):
        return chosen
    return replace(chosen, **given)
