"""From a caller's words to a validated request, or to an error that says which word to change.

Owns validation, request ids, seeds and the folding of equal prompts. Runs in the caller's thread,
before anything is queued, so a bad request never meets a good one.
"""

import copy
import hashlib
import itertools
import operator
import re
import secrets
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.stop_strings import Decode, StopStrings
from cb_rollout.errors import InvalidRequestError

MADE_ID = re.compile(r"req_([0-9]{1,18})")
# What an id that is made here looks like; a caller's own may look so too.

_CACHE_ADVICE = "shorten it, or raise num_blocks, max_blocks_per_request or max_memory_percent"
_MAX_LENGTH_ADVICE = "set max_new_tokens instead"
_MODEL_ADVICE = "shorten the prompt or lower max_new_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """What a request must fit."""

    vocab_size: int
    max_positions: int | None
    """The longest sequence that the model was made for; None: no limit known."""
    max_cached_tokens: Callable[[], int]
    """The longest sequence that the KV cache can hold, by the plan of the moment."""
    model_eos: tuple[int, ...]


class InputProcessor:
    """Makes requests."""

    def __init__(
        self, limits: ServingLimits, seed: int | None, rank: int, tokenizer: Any = None
    ) -> None:
        """Draw a fresh seed where none is given; the global generators are not asked."""
        self.limits = limits
        self._tokenizer = tokenizer
        self._seed = secrets.randbits(63) if seed is None else seed
        self._rank = rank
        self._lock = threading.Lock()
        self._num_sequences = self._next_id = 0
        self._group_numbers = itertools.count()

    def requests(
        self,
        inputs: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        members: Sequence[int] | None = None,
        request_id: str | None = None,
        is_streaming: bool = False,
        records_timestamps: bool = False,
    ) -> list[Request]:
        """Validate sequences and number their groups: equal prompts are computed once.

        Args:
            inputs: token ids of each prompt.
            params: how each is sampled; same length.
            members: each one's place, from 0, among the sequences asked of one input; None: all 0.
            request_id: of a single sequence; None: made here.
            is_streaming: whether an output is wanted after every token.
            records_timestamps: whether each token's time is wanted.

        Returns:
            Requests in the order of `inputs`.

        Raises:
            InvalidRequestError: one of them could never be served.
        """
        if not isinstance(request_id, str | None):
            raise InvalidRequestError(f"request_id={request_id!r} is no text; pass a str.")
        prompts = [self._prompt(input_ids, index) for index, input_ids in enumerate(inputs)]
        groups: dict[tuple[int, ...], tuple[int, list[int]]] = {}
        made = []
        members = members or [0] * len(prompts)
        for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            key = tuple(prompt)
            self._require_tokens_in_vocabulary(wanted)
            if key not in groups:
                groups[key] = (next(self._group_numbers), prompt)
            group, shared_prompt = groups[key]
            number, made_id = self._numbered(request_id)
            made.append(
                Request(
                    request_id=request_id or made_id,
                    prompt_ids=shared_prompt,
                    params=wanted,
                    max_new_tokens=self._max_new_tokens(prompt, wanted, index),
                    stop_tokens=wanted.stop_tokens(self.limits.model_eos),
                    seed=self._request_seed(wanted, number, members[index]),
                    group=group,
                    is_streaming=is_streaming,
                    records_timestamps=records_timestamps,
                    stop_strings=self._stop_strings(wanted),
                    matcher=None if wanted.grammar is None else wanted.grammar.matcher(),
                )
            )
            _require_reachable_minimum(made[-1], index)
        return made

    def _numbered(self, given_id: str | None) -> tuple[int, str]:
        """The next sequence's number, and an id that looks like none that a caller gave."""
        with self._lock:
            number, made_id = self._num_sequences, f"req_{self._next_id}"
            self._num_sequences += 1
            if given_id is None:
                self._next_id += 1
            elif match := MADE_ID.fullmatch(given_id):
                self._next_id = max(self._next_id, int(match[1]) + 1)
        return number, made_id

    def _prompt(self, input_ids: Sequence[int], index: int) -> list[int]:
        try:
            prompt = [operator.index(token) for token in input_ids]
        except TypeError as error:
            raise InvalidRequestError(
                f"input {index} is not a list of token ids ({error}); tokenize it, or give the "
                "generator a tokenizer."
            ) from error
        if not prompt:
            raise InvalidRequestError(f"input {index} is empty; a prompt needs at least one token.")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < self.limits.vocab_size:
                raise InvalidRequestError(
                    f"input {index} holds token id {token}, outside the model's vocabulary of "
                    f"{self.limits.vocab_size}; was it made by another model's tokenizer?"
                )
        return prompt

    def _max_new_tokens(self, prompt: list[int], params: SamplingParams, index: int) -> int:
        """How many tokens this sequence may grow by, checked against the model and the cache."""
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
        return wanted or limit - len(prompt)

    def _require_tokens_in_vocabulary(self, params: SamplingParams) -> None:
        """The parameters' own token ids; the end-of-sequence token may be one never sampled."""
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias or (),
            "bad_words": [token for word in params.bad_words for token in word],
            "begin_suppress_tokens": params.begin_suppress_tokens,
            "forced_eos_token_id": params.forced_eos_token_id,
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < self.limits.vocab_size:
                    raise InvalidRequestError(
                        f"{name} holds token id {token}, outside the model's vocabulary of "
                        f"{self.limits.vocab_size}; leave it out, or look it up in the model's own "
                        "tokenizer."
                    )
        if params.top_logprobs > self.limits.vocab_size:
            raise InvalidRequestError(
                f"top_logprobs={params.top_logprobs} is more than the model's vocabulary of "
                f"{self.limits.vocab_size}; lower it."
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
        # A copy, because a fast tokenizer that encodes in one thread refuses to decode in another.
        tokenizer = copy.deepcopy(self._tokenizer)
        return partial(
            tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def _request_seed(self, params: SamplingParams, number: int, member: int) -> int:
        """A seed of its own for every sequence, the same whenever the same things are asked again.

        A request that names a seed depends on that and on its place in its group, so that
        the members differ; any other depends on the config's seed, the rank and how many
        sequences came before it.
        """
        if params.seed is not None:
            words = ("request", params.seed, member)
        else:
            words = ("config", self._seed, self._rank, number)
        digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
        return struct.unpack("<q", digest)[0]


def _require_reachable_minimum(request: Request, index: int) -> None:
    if request.min_generated > request.max_new_tokens:
        params = request.params
        raise InvalidRequestError(
            f"input {index}: min_new_tokens={params.min_new_tokens} and min_length="
            f"{params.min_length} ask for {request.min_generated} tokens after a prompt of "
            f"{len(request.prompt_ids)}, and at most {request.max_new_tokens} may come; lower "
            "them or raise max_new_tokens."
        )
