"""What is served: a manager, its tokenizer, and what a request means to them.

Owns the way from a checked body to sequences in the engine. Text is encoded and grammars are
compiled on threads of their own, so that a long prompt holds up nobody's stream.
"""

import asyncio
import copy
import hashlib
import itertools
import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from cb_rollout.config.sampling import SamplingParams, resolved
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import InvalidRequestError
from cb_rollout.integrations.xgrammar import XGrammar
from cb_rollout.metrics.recorder import Recorder
from cb_rollout.server.chat import PromptFormat
from cb_rollout.server.errors import ApiError
from cb_rollout.server.forced_calls import call_format, forced_calls
from cb_rollout.server.options import ServerOptions
from cb_rollout.server.output_router import OutputRouter, Submission
from cb_rollout.server.schemas import ChatRequest, CompletionRequest, ResponseFormat
from cb_rollout.server.tokens import TokenTable
from cb_rollout.server.tools import ToolReader

if TYPE_CHECKING:
    from cb_rollout.server.text import Decode

T = TypeVar("T")

Wanted = str | tuple[tuple[str, str, str], ...] | None
# A JSON schema's text, calls as `forced_calls` gives them, or any JSON.

SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip
# Fields that a body and `SamplingParams` both have.

NUM_PROMPTS_KEPT = 4096
# Digests of prompts that may be asked for again while they wait.

NUM_GRAMMARS_KEPT = 64
# Compiled, by their schemas' text.

MAX_SCHEMA_CHARACTERS = 1 << 16
# A schema compiles in time that grows with its size, and no compilation can be stopped.


class Policy:
    """One model as requests see it; used on the asyncio thread that `start` was called on."""

    def __init__(
        self, manager: ContinuousBatchingManager, tokenizer: Any, options: ServerOptions
    ) -> None:
        """Take copies of the tokenizer: a fast one that encodes in two threads at once refuses.

        Args:
            manager: started.
            tokenizer: the model's.
            options: how much a request may ask.
        """
        self.manager, self.options = manager, options
        self.is_ending = False
        """Whether new requests are refused, as the server will end."""
        self.recorder = Recorder()
        self.created = int(time.time())
        reading = copy.deepcopy(tokenizer)
        self.tokens = TokenTable(reading)
        self.tools = ToolReader(reading)
        self.decode: Decode = partial(
            reading.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._format = PromptFormat(copy.deepcopy(tokenizer))
        self._format_thread = ThreadPoolExecutor(1, "cb_rollout-encode")
        self._grammar_thread = ThreadPoolExecutor(1, "cb_rollout-grammar")
        compiling = copy.deepcopy(tokenizer)
        vocab_size = manager.input_processor.limits.vocab_size
        # Equal prompts that wait beside each other are computed once, whoever sent them; numbers
        # below 0 are none that the input_processor gives.
        numbers = itertools.count(-1, -1)
        self._group_of = lru_cache(maxsize=NUM_PROMPTS_KEPT)(lambda _: next(numbers))
        self._call_format = call_format(compiling)

        @lru_cache(maxsize=NUM_GRAMMARS_KEPT)
        def grammar_of(wanted: Wanted) -> XGrammar:
            if isinstance(wanted, tuple):
                return XGrammar.from_framed_json(wanted, compiling, vocab_size)
            if wanted is not None:
                return XGrammar.from_json_schema(wanted, compiling, vocab_size)
            return XGrammar.from_json(compiling, vocab_size)

        self._grammar_of = grammar_of

    def start(self) -> None:
        """Be ready for requests, on the running asyncio loop."""
        self.output_router = OutputRouter(self.manager.loop, self.options.request_timeout_seconds)
        self.manager.loop.observers.add(self.recorder)

    def stop(self) -> None:
        """Let go of threads and of the manager, which goes on."""
        self.manager.loop.observers.remove(self.recorder)
        self._format_thread.shutdown(wait=False, cancel_futures=True)
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)

    @property
    def is_alive(self) -> bool:
        """Whether a request would be generated."""
        loop = self.manager.loop
        return loop.is_running() and not loop.is_dead and not self.is_ending

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and completion together."""
        limits = self.manager.input_processor.limits
        return min(limits.max_cached_tokens(), limits.max_positions or limits.max_cached_tokens())

    def require_known(self, model: str | None) -> None:
        """Raise 404 where a client asks for another model."""
        if model not in (None, self.options.model_name):
            raise ApiError(
                404,
                f"the model {model!r:.100} does not exist; this server has "
                f"{self.options.model_name!r}.",
                "model",
            )

    async def encode_text(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return await self._encoded(self._format.encode_text, text)

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[int]]:
        """A chat's text and token ids."""
        return await self._encoded(self._format.encode_chat, messages, tools)

    async def _encoded(self, encode: Callable[..., T], *arguments: Any) -> T:
        running = asyncio.get_running_loop()
        try:
            return await running.run_in_executor(self._format_thread, encode, *arguments)
        except (UnicodeError, TypeError) as error:
            raise InvalidRequestError("the text cannot be encoded; is it valid Unicode?") from error

    def remember(self, prompt_text: str, prompt_ids: list[int], tokens: list[int]) -> None:
        """A chat was answered; its next turn begins with these tokens."""
        self._format_thread.submit(self._format.remember, prompt_text, prompt_ids, tokens)

    async def params(self, body: CompletionRequest | ChatRequest) -> SamplingParams:
        """How a body's sequences are sampled."""
        asks_logprobs = body.logprobs is not None and body.logprobs is not False
        if asks_logprobs and not self.manager.config.return_logprobs:
            raise ApiError(400, "this server keeps no log-probabilities.", "logprobs")
        given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
        # Clients ask for the most likely tokens with temperature 0, whatever the model's habit is.
        given["do_sample"] = True
        if body.min_tokens is not None:
            given["min_new_tokens"] = body.min_tokens
        if body.logit_bias:
            given["logit_bias"] = _biases(body.logit_bias)
        if isinstance(body, ChatRequest):
            given["max_new_tokens"] = body.max_completion_tokens or body.max_tokens
            given["top_logprobs"] = body.top_logprobs or 0
            calls = forced_calls(self._call_format, body.tools, body.tool_choice)
            if calls:
                given["grammar"] = await self._compiled(calls, "tool_choice")
            else:
                given["grammar"] = await self._grammar(body.response_format)
        else:
            given["max_new_tokens"] = body.max_tokens
            given["top_logprobs"] = body.logprobs or 0
        defaults = self.manager.defaults
        given["max_new_tokens"] = given["max_new_tokens"] or defaults.max_new_tokens
        return resolved(replace(defaults, **given), defaults)

    async def _grammar(self, wanted: ResponseFormat | None) -> XGrammar | None:
        if wanted is None or wanted.type == "text":
            return None
        schema = None
        if wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.json_schema is None:
                raise ApiError(400, "response_format has no json_schema.schema.", "response_format")
            schema = json.dumps(wanted.json_schema.json_schema)
        return await self._compiled(schema, "response_format")

    async def _compiled(self, wanted: Wanted, param: str) -> XGrammar:
        """The grammar of what a request's field `param` wants."""
        size = sum(
            map(len, itertools.chain(*wanted) if isinstance(wanted, tuple) else wanted or "")
        )
        if size > MAX_SCHEMA_CHARACTERS:
            most = MAX_SCHEMA_CHARACTERS
            raise ApiError(400, f"the JSON schema has {size:,} characters of {most:,}.", param)
        running = asyncio.get_running_loop()
        try:
            return await running.run_in_executor(self._grammar_thread, self._grammar_of, wanted)
        except ImportError as error:
            raise ApiError(400, f"{param}: {error}", param) from error

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int,
        is_streaming: bool,
        headers: Mapping[str, str],
    ) -> Submission:
        """Queue `n` sequences of every prompt, those of one prompt adjacent.

        Args:
            prompts: token ids of each.
            params: how they are sampled.
            n: sequences of each prompt.
            is_streaming: whether every token is wanted as it comes.
            headers: of the HTTP request, which may name a trace to join.

        Raises:
            ApiError: more than one request may ask.
            RolloutError: the engine does not take them.
        """
        if self.is_ending:
            raise ApiError(503, "the server is ending; send it to another, or again later.")
        count = len(prompts) * n
        if count > self.options.max_sequences:
            most = self.options.max_sequences
            raise ApiError(400, f"{count} sequences are more than the {most} allowed.", "n")
        longest, limit = max(map(len, prompts)), self.options.max_prompt_tokens
        if limit is not None and longest > limit:
            raise ApiError(400, f"the prompt has {longest} tokens; {limit} are allowed.", "prompt")
        requests = self.manager.input_processor.requests(
            [prompt for prompt in prompts for _ in range(n)],
            [params] * count,
            members=[member for _ in prompts for member in range(n)],
            is_streaming=is_streaming,
        )
        for request in requests:
            request.group = self._group_of(_digest(request.prompt_ids))
        with self.manager.loop.observers.joined(headers):
            return self.output_router.submit(requests)


def _digest(prompt: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).digest()


def _biases(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise ApiError(400, "logit_bias has a key that is not a token id.", "logit_bias") from error
