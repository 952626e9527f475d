"""Make validated requests of prompts and sampling parameters, on the caller's thread.

Owns validation, request ids, seeds and the grouping of equal prompts. Queues nothing.
"""

import copy
import hashlib
import itertools
import operator
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import distributed

from cb_rollout.compat.multimodal import text_tokenizer
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.images.processor import ImagePrompt, encoded_row
from cb_rollout.engine.images.prompt_images import PromptImages
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.stop_strings import Decode, StopStrings
from cb_rollout.errors import InvalidRequestError

# A caller's own id may match too, and generated ids must avoid it.
_GENERATED_ID = re.compile(r"req_([0-9]{1,18})")

_CACHE_ADVICE = "shorten it, or raise num_blocks, max_blocks_per_request or max_memory_percent"
_MAX_LENGTH_ADVICE = "set max_new_tokens instead"
_MODEL_ADVICE = "shorten the prompt or lower max_new_tokens"

# A prompt: token ids, one encoded with its images, or `{"prompt": ids or text, "images": [...]}`.
Input = Sequence[int] | ImagePrompt | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """Bounds of the model and the KV cache on a request."""

    vocab_size: Callable[[], int]
    """Return the token ids that the model knows; embeddings may be resized."""
    max_positions: int | None
    """Longest sequence in tokens that the model supports; None: no limit."""
    max_cached_tokens: Callable[[], int]
    """Return the longest sequence in tokens that the KV cache can hold under the current plan."""
    model_eos: tuple[int, ...]
    """Token ids that end a sequence by default."""
    placeholders: frozenset[int] = frozenset()
    """Token ids that stand for images, videos and sounds."""


class InputProcessor:
    """Make requests from any thread, with unique ids and independent seeds."""

    def __init__(
        self, limits: ServingLimits, seed: int | None, rank: int | None, tokenizer: Any = None
    ) -> None:
        """Draw a seed where `seed` is None.

        `rank`, as of `ContinuousBatchingManager`, keeps the seeds of processes apart. `tokenizer`
        decodes tokens for stop strings, and as a processor encodes images.
        """
        self.limits = limits
        self._tokenizer = tokenizer
        # Drawn apart from the global generators, whose state belongs to the training script.
        self._seed = secrets.randbits(63) if seed is None else seed
        self._given_rank = rank
        self._lock = threading.Lock()
        self.num_sequences = 0
        """Sequences that were started; the number of the next one, which its draws depend on."""
        self._next_id = 0
        self._group_numbers = itertools.count()

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
        """Validate sequences and number their groups: equal prompts are computed once.

        `inputs` are prompts, or the error that the encoding of one raised; `params` has one for
        each. `members` numbers the sequences of each input, from 0; they are adjacent. Raises
        `InvalidRequestError` for a sequence that could never be served, or sampling parameters that
        are not for this model; with `keeps_refused`, refused sequences are failed requests.
        """
        if not isinstance(request_id, str | None):
            raise InvalidRequestError(f"request_id={request_id!r} is no text; pass a str.")
        groups: dict[Any, tuple[int, list[int], PromptImages | None]] = {}
        requests = []
        for index, (input_ids, wanted) in enumerate(zip(inputs, params, strict=True)):
            self._require_tokens_in_vocabulary(wanted)
            prompt, images, max_new_tokens, refusal = self._checked(input_ids, wanted, index)
            if refusal is not None and not keeps_refused:
                raise refusal
            key = tuple(prompt), images and images.digest
            if key not in groups:
                groups[key] = (next(self._group_numbers), prompt, images)
            group, shared_prompt, shared_images = groups[key]
            for member in members:
                number, generated_id = self._next_number_and_id(request_id)
                request = Request(
                    request_id=request_id or generated_id,
                    prompt_ids=shared_prompt,
                    params=wanted,
                    max_new_tokens=max_new_tokens,
                    stop_tokens=wanted.stop_tokens(self.limits.model_eos),
                    seed=self._request_seed(wanted, number, member),
                    group=group,
                    images=shared_images,
                    is_streaming=is_streaming,
                    records_timestamps=records_timestamps,
                    stop_strings=self._stop_strings(wanted),
                    matcher=None if wanted.grammar is None else wanted.grammar.matcher(),
                )
                if refusal is not None:
                    request.fail(str(refusal), refusal)
                requests.append(request)
        return requests

    def _checked(
        self, input_ids: Input | InvalidRequestError, params: SamplingParams, index: int
    ) -> tuple[list[int], PromptImages | None, int, InvalidRequestError | None]:
        """Return an input's token ids and images, the most tokens to sample, a refusal or None."""
        prompt: list[int] = []
        images = None
        try:
            if isinstance(input_ids, Mapping):
                input_ids = encoded_row(input_ids, self._tokenizer, index)
            if isinstance(input_ids, ImagePrompt):
                images = input_ids.images(self.limits.placeholders)
                input_ids = input_ids.token_ids
            prompt = _prompt(input_ids, index)
            return prompt, images, self._max_new_tokens(prompt, params, index), None
        except InvalidRequestError as error:
            return prompt, None, 0, error

    def _next_number_and_id(self, given_id: str | None) -> tuple[int, str]:
        with self._lock:
            number, generated_id = self.num_sequences, f"req_{self._next_id}"
            self.num_sequences += 1
            if given_id is None:
                self._next_id += 1
            elif match := _GENERATED_ID.fullmatch(given_id):
                self._next_id = max(self._next_id, int(match[1]) + 1)
        return number, generated_id

    def _max_new_tokens(self, prompt: list[int], params: SamplingParams, index: int) -> int:
        extremes, advice = (min(prompt), max(prompt)), "was it made by another model's tokenizer?"
        self._require_known(f"input {index}", extremes, advice)
        limits = [(self.limits.max_cached_tokens(), "the KV cache holds", _CACHE_ADVICE)]
        if self.limits.max_positions is not None:
            limits.append((self.limits.max_positions, "the model takes", _MODEL_ADVICE))
        if params.max_length is not None and params.max_new_tokens is None:
            limits.append((params.max_length, "max_length allows", _MAX_LENGTH_ADVICE))
        wanted = params.max_new_tokens
        limit, holds, advice = min(limits, key=operator.itemgetter(0))
        if len(prompt) + (wanted or 1) > limit:
            completion = "" if wanted is None else f" and max_new_tokens={wanted}"
            raise InvalidRequestError(
                f"input {index} has {len(prompt)} tokens{completion}, but {holds} at most "
                f"{limit} of one sequence; {advice}."
            )
        most = wanted or limit - len(prompt)
        least = max(params.min_new_tokens, params.min_length - len(prompt))
        if least > most:
            raise InvalidRequestError(
                f"input {index}: min_new_tokens={params.min_new_tokens} and min_length="
                f"{params.min_length} ask for {least} tokens after a prompt of {len(prompt)}, and "
                f"at most {most} may come; lower them or raise max_new_tokens."
            )
        return most

    def _require_tokens_in_vocabulary(self, params: SamplingParams) -> None:
        eos: Any = params.eos_token_id or ()
        named = {
            # A model may name ends of its own that it has no logit for; -1 is none.
            "eos_token_id": [t for t in eos if t != -1 and t not in self.limits.model_eos],
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias or (),
            "sequence_bias": [t for sequence in params.sequence_bias or () for t in sequence],
            "bad_words": [token for word in params.bad_words for token in word],
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

    def _require_known(self, holder: str, tokens: Iterable[int], advice: str) -> None:
        size = self.limits.vocab_size()
        for token in tokens:
            if not 0 <= token < size:
                raise InvalidRequestError(
                    f"{holder} holds token id {token}, outside the model's vocabulary of {size}; "
                    f"{advice}"
                )

    def _stop_strings(self, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"stop={params.stop!r} is looked for in text, which takes a tokenizer; make the "
                "generator or the manager with tokenizer=, or give stop_token_ids."
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
        # torchrun and accelerate set it before any group exists; another's may be no number.
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
    try:
        prompt = [operator.index(token) for token in input_ids]
    except TypeError as error:
        raise InvalidRequestError(
            f"input {index} is not a list of token ids ({error}); tokenize it, or give the "
            "generator a tokenizer."
        ) from error
    if not prompt:
        raise InvalidRequestError(f"input {index} is empty; a prompt needs at least one token.")
    return prompt
