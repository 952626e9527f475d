"""The served model: the way from a parsed body to sequences in the engine, within limits.

Prompts are encoded and grammars compiled on threads of their own, so that a long prompt delays no
stream; everything else runs on the server's asyncio thread.
"""

import copy
import hashlib
import json
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from cb_rollout.compat.multimodal import text_tokenizer
from cb_rollout.config.sampling import SamplingParams, resolved
from cb_rollout.engine.images.processor import ImagePrompt
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.errors import ConfigurationError, EngineDeadError, InvalidRequestError
from cb_rollout.integrations.xgrammar import XGrammar
from cb_rollout.rollout.prompts import Encoded
from cb_rollout.server import protocol
from cb_rollout.server.detokenizer import Decode, TokenTable
from cb_rollout.server.options import ServerOptions
from cb_rollout.server.output_router import EngineControl, OutputRouter, Submission, on_thread
from cb_rollout.server.prompt_encoder import EncodedChat, PromptEncoder
from cb_rollout.server.protocol import ApiError
from cb_rollout.server.rl.weight_updates import Sync, WeightUpdates
from cb_rollout.server.sessions import Sessions
from cb_rollout.server.tool_parser import ToolParser

T = TypeVar("T")

# Fields of the same name and meaning in a body and in `SamplingParams`.
SAME_NAME = {*protocol.Sampling.model_fields, "top_k"} - {"min_tokens"}

# The time to compile a schema grows with its size, and a compilation cannot be stopped.
MAX_SCHEMA_CHARACTERS = 1 << 16


class ServedModel:
    """The model as requests see it; used on the asyncio thread that called `start`.

    The arguments are those of `start_server`. Each thread has a copy of the tokenizer, for a fast
    tokenizer raises if two threads encode at once. Raises `ConfigurationError` where weight updates
    are allowed, and the model takes none.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        tokenizer: Any,
        options: ServerOptions,
        trained: torch.nn.Module | None,
        sync_weights: Sync | None,
    ) -> None:
        self.manager, self.options = manager, options
        self.weights: WeightUpdates | None = None
        """Receives weight updates; None: they are refused."""
        if options.allow_weight_updates:
            if trained is None or sync_weights is None:
                raise ConfigurationError(
                    "allow_weight_updates needs the weights of a generator; call its serve()."
                )
            seconds = options.weight_update_timeout_seconds
            self.weights = WeightUpdates(manager, trained, sync_weights, seconds)
        self.encoder = PromptEncoder(copy.deepcopy(tokenizer), options)
        tokenizer = text_tokenizer(tokenizer)
        self.sessions = Sessions()
        self.is_ending = False
        """True once the server drains: new requests are refused."""
        self.created = int(time.time())
        decoding = copy.deepcopy(tokenizer)
        self.tokens = TokenTable(decoding)
        self.tool_parser = ToolParser(decoding)
        self.decode: Decode = partial(
            decoding.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._encoder_thread = ThreadPoolExecutor(1, "cb_rollout-encode")
        self._grammar_thread = ThreadPoolExecutor(1, "cb_rollout-grammar")
        self._compiling = copy.deepcopy(tokenizer)

    def start(self) -> None:
        """Connect the running asyncio loop to the engine."""
        self.output_router = OutputRouter(self.manager, self.options.request_timeout_seconds)
        self.control = EngineControl(self.manager, self.output_router)

    def stop(self) -> None:
        """End the threads; the manager goes on."""
        self.control.stop()
        if self.weights is not None:
            self.weights.stop()
        self._encoder_thread.shutdown(wait=False, cancel_futures=True)
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)

    def require_ready(self) -> None:
        """Raise 503 where no request would be generated."""
        if self.is_ending:
            raise ApiError(503, "the server is ending; send it to another, or again later.")
        if not self.manager.loop.is_alive:
            raise protocol.as_api_error(EngineDeadError())
        if PauseReason.UPDATE in self.manager.pauses.reasons:
            raise ApiError(503, PauseReason.UPDATE)

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a sequence, prompt and completion together."""
        limits = self.manager.limits
        return min(limits.max_cached_tokens(), limits.max_positions or limits.max_cached_tokens())

    def require_known(self, model: str | None) -> None:
        """Raise 404 for the name of another model."""
        if model not in (None, name := self.options.model_name):
            why = f"the model {model!r:.100} does not exist; this server has {name!r}."
            raise ApiError(404, why, "model")

    def require_few(self, num_prompts: int, n: int) -> None:
        """Raise 400 for more sequences of a request than are allowed."""
        count, most = num_prompts * n, self.options.max_sequences
        if count > most:
            raise ApiError(400, f"{count} sequences are more than the {most} allowed.", "n")

    async def encoded(self, encode: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the encoder on its thread."""
        try:
            return await on_thread(self._encoder_thread, encode, *arguments)
        except (UnicodeError, TypeError) as error:
            raise InvalidRequestError("the text cannot be encoded; is it valid Unicode?") from error

    def remember(self, chat: EncodedChat, tokens: list[int]) -> None:
        """Keep an answered chat, for its next turn to begin with these tokens."""
        self._encoder_thread.submit(self.encoder.remember, chat, tokens)

    async def sampling_params(
        self,
        body: protocol.CompletionRequest | protocol.ChatCompletionRequest | protocol.TokenSampling,
    ) -> SamplingParams:
        """Return the sampling parameters of a body, with its grammar compiled."""
        asks_logprobs = body.logprobs is not None and body.logprobs is not False
        if asks_logprobs and not self.manager.config.return_logprobs:
            raise ApiError(400, "this server keeps no log-probabilities.", "logprobs")
        fields = {name: x for name in SAME_NAME if (x := getattr(body, name)) is not None}
        if fields.get("top_k") == -1:
            # vLLM's other word for no truncation.
            fields["top_k"] = 0
        # OpenAI's clients ask for greedy decoding with temperature 0 only.
        fields["do_sample"] = True
        if body.min_tokens is not None:
            fields["min_new_tokens"] = body.min_tokens
        max_new_tokens, top_logprobs = body.max_tokens, body.logprobs
        if isinstance(body, protocol.ChatCompletionRequest):
            max_new_tokens = body.max_completion_tokens or body.max_tokens
            top_logprobs = body.top_logprobs
            fields["grammar"] = await self._grammar(body.response_format)
        defaults = self.manager.defaults
        fields["top_logprobs"] = top_logprobs or 0
        fields["max_new_tokens"] = max_new_tokens or defaults.max_new_tokens
        return resolved(replace(defaults, **fields), defaults)

    async def _grammar(self, form: protocol.ResponseFormat | None) -> XGrammar | None:
        if form is None or form.type == "text":
            return None
        compile_it, param = XGrammar.from_json, "response_format"
        vocab_size = self.manager.limits.vocab_size()
        if form.type == "json_schema":
            if form.json_schema is None or form.json_schema.json_schema is None:
                raise ApiError(400, "response_format has no json_schema.schema.", param)
            schema = json.dumps(form.json_schema.json_schema)
            if (size := len(schema)) > MAX_SCHEMA_CHARACTERS:
                why = f"the JSON schema has {size:,} characters of {MAX_SCHEMA_CHARACTERS:,}."
                raise ApiError(400, why, param)
            compile_it = partial(XGrammar.from_json_schema, schema)
        try:
            return await on_thread(self._grammar_thread, compile_it, self._compiling, vocab_size)
        except (ImportError, InvalidRequestError) as error:
            raise ApiError(400, f"{param}: {error}", param) from error

    async def prompt_logprobs(
        self, prompts: Sequence[list[int]], num: int, temperature: float
    ) -> list[list[dict[int, tuple[float, int]]]]:
        """Score prompts by plain forwards between two steps of the engine, each by itself."""

        def score(prompt: list[int]) -> list[dict[int, tuple[float, int]]]:
            with self.manager.loop.paused():
                return self.manager.engine.prompt_logprobs(prompt, temperature, num)

        return [await self.control.run(partial(score, prompt)) for prompt in prompts]

    async def submit(
        self,
        prompts: Sequence[Encoded],
        params: SamplingParams,
        n: int,
        is_streaming: bool,
        client_id: str | None,
        session_id: str | None,
    ) -> Submission:
        """Queue `n` sequences of each prompt, those of a prompt adjacent, for a session or none.

        Raises `ApiError` beyond a limit of the server or without the session, `RolloutError` where
        the engine refuses.
        """
        self.require_ready()
        self.require_few(len(prompts), n)
        session = None if session_id is None else self.sessions.get(session_id)
        lengths = [len(p.token_ids if isinstance(p, ImagePrompt) else p) for p in prompts]
        longest, limit = max(lengths), self.options.max_prompt_tokens
        if limit is not None and longest > limit:
            raise ApiError(400, f"the prompt has {longest} tokens; {limit} are allowed.", "prompt")
        create = partial(self.manager.create_requests, members=range(n), is_streaming=is_streaming)
        each = [params] * len(prompts)
        if any(isinstance(prompt, ImagePrompt) and prompt.num_images for prompt in prompts):
            # The first pictures run a forward.
            try:
                requests = await on_thread(self._encoder_thread, create, prompts, each)
            except ConfigurationError as error:
                why = f"the model runs no such pictures here: {error}"
                raise ApiError(400, why, "messages") from error
        else:
            requests = create(prompts, each)
        for request in requests:
            request.group = _group_of(request)
        return self.output_router.submit(requests, client_id, session)


def _group_of(request: Request) -> int:
    """Return a number of the prompt, below those of the input processor.

    Equal prompts that wait together are prefilled once, even from different clients.
    """
    pictures = b"" if request.images is None else request.images.digest
    token_ids = array("q", request.prompt_ids).tobytes()
    digest = hashlib.blake2b(token_ids + pictures, digest_size=16).digest()
    return -1 - int.from_bytes(digest)
