"""Make validated requests from prompts and sampling parameters, on the caller's thread.

Owns validation, request ids, seeds and the grouping of equal prompts. Queues nothing.
"""

import copy
import hashlib
import itertools
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from numbers import Number
from typing import Any, NamedTuple

from torch import distributed

from cb_rollout.compat.multimodal import text_tokenizer
from cb_rollout.config.checks import plain_token_ids
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.images.processor import ImagePrompt, encoded_row
from cb_rollout.engine.images.prompt_images import PromptImages
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.stop_strings import Decode, StopStrings
from cb_rollout.errors import InvalidRequestError

# A caller's own id may match too, and generated ids must avoid it.
_GENERATED_ID = re.compile(r"req_([0-9]{1,18})(?:__child#[0-9]+)?")

_CACHE_ADVICE = "shorten it, or raise num_blocks or max_memory_percent"
_CAP_ADVICE = "raise it, or shorten the prompt or lower max_new_tokens"
_MAX_LENGTH_ADVICE = "set max_new_tokens instead"
_MODEL_ADVICE = "shorten the prompt or lower max_new_tokens"

# A prompt: token ids, an encoded prompt with images, or `{"prompt": ids or text, "images": [...]}`.
Input = Sequence[int] | ImagePrompt | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """Bounds of the model and the KV cache on a request."""

    vocab_size: Callable[[], int]
    """Return the number of token ids that the model knows; embeddings may be resized."""
    max_positions: int | None
    """Longest sequence in tokens that the model supports; None: no limit."""
    max_cached_tokens: Callable[[], int]
    """Return the longest sequence in tokens that the KV cache can hold under the current plan."""
    max_model_len: int | None = None
    """`max_model_len` of the settings: the longest sequence in tokens; None: no cap."""
    model_eos: tuple[int, ...]
    """Token ids that end a sequence by default."""
    placeholders: frozenset[int] = frozenset()
    """Token ids that stand for images, videos and sounds."""
    adapters: Callable[[], Sequence[str]] = tuple
    """Return the names of the adapters that a sequence may be sampled with."""


def _sequence_id(first_id: str, index: int) -> str:
    """Return a sequence's id: the input's id for the first, a child's id for each other one."""
    return first_id if index == 0 else f"{first_id}__child#{index - 1}"


class _Group(NamedTuple):
    """Equal prompts of one call, which are computed once."""

    number: int
    prompt_ids: list[int]
    images: PromptImages | None


class _CheckedInput(NamedTuple):
    """An input after its checks."""

    prompt_ids: list[int]
    images: PromptImages | None
    max_new_tokens: int
    """The most tokens to sample."""
    refusal: InvalidRequestError | None
    """The reason why it can never be served; None: it can be served."""


class _LengthLimit(NamedTuple):
    """A bound on the length of a sequence, and the words of its error."""

    num_tokens: int
    holds: str
    """The subject and verb of the bound, such as "the model takes"."""
    advice: str


class InputProcessor:
    """Make requests from any thread, with unique ids and independent seeds."""

    def __init__(
        self, limits: ServingLimits, seed: int | None, rank: int | None, tokenizer: Any = None
    ) -> None:
        """Draw a seed if `seed` is None.

        `rank`, as in `ContinuousBatchingManager`, keeps the seeds of processes apart. `tokenizer`
        decodes tokens for stop strings; a processor also encodes images.
        """
        self.limits = limits
        self._tokenizer = tokenizer
        # Drawn apart from the global generators, whose state belongs to the training script.
        self._seed = secrets.randbits(63) if seed is None else seed
        self._given_rank = rank
        self._lock = threading.Lock()
        self.num_sequences = 0
        """Sequences started so far. It is the number of the next sequence, which its draws use."""
        self._next_id = 0
        self._group_numbers = itertools.count()

    def state_dict(self) -> dict[str, int]:
        """Return the numbers that determine the draws and ids of the next sequences."""
        with self._lock:
            return {
                "seed": self._seed,
                "num_sequences": self.num_sequences,
                "next_id": self._next_id,
            }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the draws and ids of a `state_dict`."""
        with self._lock:
            self._seed = state["seed"]
            self.num_sequences = state["num_sequences"]
            self._next_id = state["next_id"]

    def go_on(self, state: Mapping[str, int]) -> None:
        """Continue the draws of a `state_dict` under the present seed, with ids of no request."""
        with self._lock:
            self.num_sequences = state["num_sequences"]
            self._next_id = max(self._next_id, state["next_id"])

    def new_group(self) -> int:
        """Return a number that no other group of sequences has."""
        return next(self._group_numbers)

    def requests(
        self,
        inputs: Sequence[Input | InvalidRequestError],
        params: Sequence[SamplingParams],
        *,
        members: Sequence[int] = (0,),
        request_id: str | None = None,
        is_streaming: bool = False,
        records_timestamps: bool = False,
        keeps_refused: bool = False,
    ) -> list[Request]:
        """Validate sequences, and number their groups: equal prompts are computed once.

        Sequences with different adapters are in different groups.

        Args:
            inputs: prompts, or the error that the encoding of one raised.
            params: the sampling parameters of each input.
            members: numbers of each input's sequences, from 0; they are adjacent.
            request_id: id of the first sequence of each input; None: a new id. Further sequences
                are named as transformers 5.24 names them: `ID__child#0`, and so on.
            is_streaming: deliver an output after each token.
            records_timestamps: record when each token was sampled.
            keeps_refused: return a failed request for each refused input, instead of raising.

        Raises:
            InvalidRequestError: a sequence could never be served, or the sampling parameters do
                not fit this model.
        """
        if not isinstance(request_id, str | None):
            raise InvalidRequestError(f"request_id={request_id!r} is not a string; pass a str.")
        groups: dict[Any, _Group] = {}
        requests = []
        for index, (input_ids, wanted) in enumerate(zip(inputs, params, strict=True)):
            self._require_tokens_in_vocabulary(wanted)
            self.require_adapter(wanted.adapter)
            checked = self._checked(input_ids, wanted, index)
            if checked.refusal is not None and not keeps_refused:
                raise checked.refusal
            digest = None if checked.images is None else checked.images.digest
            key = (tuple(checked.prompt_ids), digest, wanted.adapter)
            if key not in groups:
                groups[key] = _Group(self.new_group(), checked.prompt_ids, checked.images)
            group = groups[key]
            first_id = self._first_id(request_id)
            for index_in_input, member in enumerate(members):
                number = self._next_number()
                request = Request(
                    request_id=_sequence_id(first_id, index_in_input),
                    prompt_ids=group.prompt_ids,
                    params=wanted,
                    max_new_tokens=checked.max_new_tokens,
                    stop_tokens=wanted.stop_tokens(self.limits.model_eos),
                    seed=self._request_seed(wanted, number, member),
                    group=group.number,
                    images=group.images,
                    is_streaming=is_streaming,
                    records_timestamps=records_timestamps,
                    stop_strings=self.stop_strings(wanted),
                    matcher=None if wanted.grammar is None else wanted.grammar.matcher(),
                )
                if checked.refusal is not None:
                    request.fail(str(checked.refusal), checked.refusal)
                requests.append(request)
        return requests

    def text(self, input_ids: Input, index: int) -> tuple[list[int], PromptImages | None]:
        """Return the token ids and images of a text that is scored, not continued.

        Args:
            input_ids: token ids, or a prompt with images.
            index: its index among the inputs, for errors.

        Raises:
            InvalidRequestError: it is empty, holds no token ids of the model, or is longer than the
                model takes.
        """
        token_ids, images = self._with_images(input_ids, index)
        self._require_prompt_known(token_ids, index)
        longest = self.limits.max_positions
        if longest is not None and len(token_ids) > longest:
            raise InvalidRequestError(
                f"input {index} has {len(token_ids)} tokens, but the model takes at most {longest} "
                "per sequence; shorten the text."
            )
        return token_ids, images

    def _with_images(
        self, input_ids: Input | InvalidRequestError, index: int
    ) -> tuple[list[int], PromptImages | None]:
        """Return an input's token ids and images."""
        images = None
        if isinstance(input_ids, Mapping):
            input_ids = encoded_row(input_ids, self._tokenizer, index)
        if isinstance(input_ids, ImagePrompt):
            images = input_ids.images(self.limits.placeholders)
            input_ids = input_ids.token_ids
        return _prompt(input_ids, index), images

    def _require_prompt_known(self, prompt: list[int], index: int) -> None:
        advice = "was it made by another model's tokenizer?"
        self._require_known(f"input {index}", (min(prompt), max(prompt)), advice)

    def _checked(
        self, input_ids: Input | InvalidRequestError, params: SamplingParams, index: int
    ) -> "_CheckedInput":
        prompt: list[int] = []
        try:
            prompt, images = self._with_images(input_ids, index)
            max_new_tokens = self._max_new_tokens(prompt, params, index)
        except InvalidRequestError as error:
            return _CheckedInput(prompt, None, 0, error)
        return _CheckedInput(prompt, images, max_new_tokens, None)

    def _next_number(self) -> int:
        with self._lock:
            number = self.num_sequences
            self.num_sequences += 1
        return number

    def _first_id(self, given_id: str | None) -> str:
        """Return the id of an input's first sequence: the caller's, or a new one."""
        with self._lock:
            if given_id is None:
                self._next_id += 1
                return f"req_{self._next_id - 1}"
            if match := _GENERATED_ID.fullmatch(given_id):
                self._next_id = max(self._next_id, int(match[1]) + 1)
        return given_id

    def _max_new_tokens(self, prompt: list[int], params: SamplingParams, index: int) -> int:
        self._require_prompt_known(prompt, index)
        wanted = params.max_new_tokens
        limit = min(self._length_limits(params), key=lambda limit: limit.num_tokens)
        if len(prompt) + (wanted or 1) > limit.num_tokens:
            completion = "" if wanted is None else f" and max_new_tokens={wanted}"
            raise InvalidRequestError(
                f"input {index} has {len(prompt)} tokens{completion}, but {limit.holds} at most "
                f"{limit.num_tokens} per sequence; {limit.advice}."
            )
        most = wanted or limit.num_tokens - len(prompt)
        least = max(params.min_new_tokens, params.min_length - len(prompt))
        if least > most:
            raise InvalidRequestError(
                f"input {index}: min_new_tokens={params.min_new_tokens} and "
                f"min_length={params.min_length} ask for at least {least} new tokens after a "
                f"prompt of {len(prompt)}, but at most {most} are allowed; lower them or raise "
                "max_new_tokens."
            )
        return most

    def _length_limits(self, params: SamplingParams) -> list["_LengthLimit"]:
        """Return the bounds on a sequence's length; errors name the first of equal bounds."""
        limits: list[_LengthLimit] = []
        if self.limits.max_model_len is not None:
            limits.append(
                _LengthLimit(self.limits.max_model_len, "max_model_len allows", _CAP_ADVICE)
            )
        max_cached_tokens = self.limits.max_cached_tokens()
        limits.append(_LengthLimit(max_cached_tokens, "the KV cache holds", _CACHE_ADVICE))
        if self.limits.max_positions is not None:
            limits.append(_LengthLimit(self.limits.max_positions, "the model takes", _MODEL_ADVICE))
        if params.max_length is not None and params.max_new_tokens is None:
            limits.append(_LengthLimit(params.max_length, "max_length allows", _MAX_LENGTH_ADVICE))
        return limits

    def _require_tokens_in_vocabulary(self, params: SamplingParams) -> None:
        eos: Any = params.eos_token_id or ()
        named: dict[str, Iterable[int]] = {
            # A model may name end-of-sequence ids that have no logit; -1 means no id.
            "eos_token_id": [t for t in eos if t != -1 and t not in self.limits.model_eos],
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias or (),
            "sequence_bias": chain.from_iterable(params.sequence_bias or ()),
            "bad_words": chain.from_iterable(params.bad_words),
            "begin_suppress_tokens": params.begin_suppress_tokens,
            "forced_bos_token_id": params.forced_bos_token_id,
            "forced_eos_token_id": params.forced_eos_token_id,
        }
        advice = "leave it out, or look it up in the model's own tokenizer."
        for name, tokens in named.items():
            self._require_known(name, tokens, advice)
        if params.top_logprobs > self.limits.vocab_size():
            raise InvalidRequestError(
                f"top_logprobs={params.top_logprobs} is more than the model's vocabulary of "
                f"{self.limits.vocab_size()}; lower it."
            )

    def require_adapter(self, adapter: str | None) -> None:
        """Raise `InvalidRequestError` if the model lacks an adapter; None: the active adapters."""
        if adapter is None:
            return
        names = self.limits.adapters()
        if adapter not in names:
            raise InvalidRequestError(
                f"adapter={adapter!r} is no adapter of the model, which has "
                f"{', '.join(names) or 'none'}; name one of them, or leave it None for those that "
                "are active."
            )

    def _require_known(self, holder: str, tokens: Iterable[int], advice: str) -> None:
        size = self.limits.vocab_size()
        for token in tokens:
            if not 0 <= token < size:
                raise InvalidRequestError(
                    f"{holder} holds token id {token}, outside the model's vocabulary of {size}; "
                    f"{advice}"
                )

    def stop_strings(self, params: SamplingParams) -> StopStrings | None:
        """Return a new detector of a sequence's stop strings; None: it has none."""
        if not params.stop:
            return None
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"stop={params.stop!r} is matched in decoded text, which needs a tokenizer; pass "
                "tokenizer= to the generator or manager, or set stop_token_ids."
            )
        return StopStrings(params.stop, self._decode)

    @cached_property
    def _decode(self) -> Decode:
        # A fast tokenizer that encodes in one thread refuses to decode in another.
        tokenizer = copy.deepcopy(text_tokenizer(self._tokenizer))
        return partial(
            tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    @cached_property
    def _rank(self) -> int:
        if self._given_rank is not None:
            return self._given_rank
        # Asked late: a process group may be initialised after the engine is made.
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank()
        # torchrun and accelerate set RANK before any group exists; other launchers may set text.
        named = os.environ.get("RANK", "")
        return int(named) if named.isdecimal() else 0

    def _request_seed(self, params: SamplingParams, number: int, member: int) -> int:
        """Return a reproducible 64-bit seed, distinct for each sequence."""
        if params.seed is not None:
            words = ("request", params.seed, member)
        else:
            words = ("config", self._seed, self._rank, number)
        digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def _prompt(input_ids: Any, index: int) -> list[int]:
    if isinstance(input_ids, InvalidRequestError):
        raise input_ids
    if isinstance(input_ids, str):
        raise InvalidRequestError(
            f"input {index} is text, but a manager needs token ids; pass "
            "tokenizer(text)['input_ids'], or use a RolloutGenerator with tokenizer=."
        )
    num_axes = getattr(input_ids, "ndim", 1)
    if num_axes == 0 or isinstance(input_ids, Number):
        raise InvalidRequestError(
            f"input {index} is a single number; pass add_request one prompt, such as [5, 6, 7], or "
            "add_requests several, such as [[5, 6, 7], [8, 9]]."
        )
    if num_axes == 2 or _is_list_of_lists(input_ids):
        raise InvalidRequestError(
            f"input {index} is a batch of {len(input_ids)} sequences, but one sequence is "
            "expected; pass one row, input_ids[0], or call add_requests(input_ids)."
        )
    try:
        prompt = plain_token_ids(input_ids)
    except TypeError as error:
        raise InvalidRequestError(
            f"input {index} is not a list of token ids ({error}); pass tokenizer(text)"
            "['input_ids'], or give the generator a tokenizer."
        ) from error
    if not prompt:
        raise InvalidRequestError(f"input {index} is empty; a prompt needs at least one token.")
    return prompt


def _is_list_of_lists(input_ids: Any) -> bool:
    if not isinstance(input_ids, list | tuple) or not input_ids:
        return False
    first = input_ids[0]
    return isinstance(first, list | tuple) or getattr(first, "ndim", 0) == 1
