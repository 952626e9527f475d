"""Serve a model: turn parsed request bodies into engine sequences, within limits.

Prompts are encoded and grammars compiled on separate threads, so that a long prompt delays no
stream. Everything else runs on the server's asyncio thread.
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
from cb_rollout.engine.memory.device import max_requests_per_batch
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.engine.service.plain_forwards import prompt_logprobs
from cb_rollout.errors import ConfigurationError, EngineDeadError, InvalidRequestError
from cb_rollout.integrations.xgrammar import XGrammar
from cb_rollout.rollout.prompts import Encoded
from cb_rollout.server import protocol
from cb_rollout.server.detokenizer import Decode, TokenTable
from cb_rollout.server.openai.tool_parser import ToolParser, strict_parameters
from cb_rollout.server.options import ServerOptions
from cb_rollout.server.output_router import EngineControl, OutputRouter, Submission, on_thread
from cb_rollout.server.prompt_encoder import EncodedChat, PromptEncoder
from cb_rollout.server.protocol import ApiError
from cb_rollout.server.rl.weight_updates import Sync, WeightUpdates
from cb_rollout.server.sessions import Sessions
from cb_rollout.server.xinference import Launches

T = TypeVar("T")

# Fields of the same name and meaning in a body and in `SamplingParams`.
SAME_NAME = (set(protocol.Sampling.model_fields) | {"top_k"}) - {"min_tokens"}

# The time to compile a schema grows with its size, and a compilation cannot be stopped.
MAX_SCHEMA_CHARACTERS = 1 << 16


class ServedModel:
    """The served model; used on the asyncio thread that called `start`.

    Each thread has a copy of the tokenizer, because a fast tokenizer raises if two threads encode
    at once.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        tokenizer: Any,
        options: ServerOptions,
        trained: torch.nn.Module | None,
        sync_weights: Sync | None,
    ) -> None:
        """Prepare to serve a manager's model.

        Args:
            manager: the manager that samples.
            tokenizer: the model's tokenizer or processor.
            options: the options of `start_server`.
            trained: the model that weight updates write, maybe wrapped; None: there is no such
                model.
            sync_weights: begins a policy version with the new weights; None: it is not available.

        Raises:
            ConfigurationError: weight updates are allowed, but the model cannot take them.
        """
        self.manager = manager
        self.options = options
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
        by_device = max_requests_per_batch(manager.model.device)
        max_num_seqs = manager.config.max_requests_per_batch or by_device
        self.launches = Launches(manager.model, options.model_name, max_num_seqs)
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
        """End the threads; the manager keeps running."""
        self.control.stop()
        if self.weights is not None:
            self.weights.stop()
        self._encoder_thread.shutdown(wait=False, cancel_futures=True)
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)

    def require_ready(self) -> None:
        """Raise 503 if the engine cannot generate."""
        if self.is_ending:
            raise ApiError(503, "the server is ending; send it to another, or again later.")
        if not self.manager.loop.is_alive:
            raise protocol.as_api_error(EngineDeadError())
        if PauseReason.UPDATE in self.manager.pauses.reasons:
            raise ApiError(503, PauseReason.UPDATE)

    @property
    def max_model_len(self) -> int:
        """Return the maximum tokens of a sequence, including prompt and completion."""
        limits = self.manager.limits
        return min(limits.max_cached_tokens(), limits.max_positions or limits.max_cached_tokens())

    @property
    def names(self) -> list[str]:
        """Return the valid values of `model`: the names of the model, then its adapters."""
        names = self.launches.names
        return [*names, *(name for name in self.manager.limits.adapters() if name not in names)]

    def require_known(self, model: str | None) -> None:
        """Raise 404 for the name of another model."""
        if model is not None and model not in self.launches.names and model not in self.names:
            has = ", ".join(map(repr, [self.options.model_name, *self.manager.limits.adapters()]))
            why = f"the model {model!r:.100} does not exist; this server has {has}."
            raise ApiError(404, why, "model")

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a known `model` names; None: it names the model itself."""
        return None if model is None or model in self.launches.names else model

    def require_few(self, num_prompts: int, n: int) -> None:
        """Raise 400 if a request has too many sequences."""
        count = num_prompts * n
        most = self.options.max_sequences
        if count > most:
            raise ApiError(400, f"{count} sequences are more than the {most} allowed.", "n")

    async def encoded(self, encode: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the encoder on its thread."""
        try:
            return await on_thread(self._encoder_thread, encode, *arguments)
        except (UnicodeError, TypeError) as error:
            raise InvalidRequestError("the text cannot be encoded; is it valid Unicode?") from error

    def remember(self, chat: EncodedChat, tokens: list[int]) -> None:
        """Store an answered chat, so that its next turn can begin with these tokens."""
        self._encoder_thread.submit(self.encoder.remember, chat, tokens)

    async def sampling_params(
        self,
        body: protocol.CompletionRequest | protocol.ChatCompletionRequest | protocol.TokenSampling,
        model: str | None,
    ) -> SamplingParams:
        """Return the sampling parameters of a body, with its grammar compiled.

        Args:
            body: the request's body, or its part with the sampling parameters.
            model: the request's `model`, which `require_known` has accepted.
        """
        asks_logprobs = body.logprobs is not None and body.logprobs is not False
        if asks_logprobs and not self.manager.config.return_logprobs:
            raise ApiError(400, "this server keeps no log-probabilities.", "logprobs")
        fields: dict[str, Any] = {}
        for name in SAME_NAME:
            value = getattr(body, name)
            if value is not None:
                fields[name] = value
        if fields.get("top_k") == -1:
            # vLLM also writes -1 for no truncation.
            fields["top_k"] = 0
        # For OpenAI's clients, temperature 0 is the only way to ask for greedy decoding.
        fields["do_sample"] = True
        if body.min_tokens is not None:
            fields["min_new_tokens"] = body.min_tokens
        if isinstance(body, protocol.ChatCompletionRequest):
            max_new_tokens = body.max_completion_tokens or body.max_tokens
            top_logprobs = body.top_logprobs
            fields["grammar"] = await self._grammar_of_chat(body)
        else:
            max_new_tokens = body.max_tokens
            top_logprobs = body.logprobs
        defaults = self.manager.defaults
        fields["adapter"] = self.adapter_of(model)
        fields["top_logprobs"] = top_logprobs or 0
        fields["max_new_tokens"] = max_new_tokens or defaults.max_new_tokens
        return resolved(replace(defaults, **fields), defaults)

    async def _grammar_of_chat(self, body: protocol.ChatCompletionRequest) -> XGrammar | None:
        """Compile the grammar of a chat's `response_format` or strict tools, if it has any."""
        form = body.response_format
        if form is not None and form.type == "json_object":
            return await self._compiled(XGrammar.from_json, "response_format")
        if form is not None and form.type == "json_schema":
            if form.json_schema is None or form.json_schema.json_schema is None:
                why = "response_format has no json_schema.schema."
                raise ApiError(400, why, "response_format")
            schema = json.dumps(form.json_schema.json_schema)
            _require_short_schema(schema, "response_format")
            compile_it = partial(XGrammar.from_json_schema, schema)
            return await self._compiled(compile_it, "response_format")
        functions = [tool.function for tool in body.tools or ()]
        is_strict = any(function.strict for function in functions)
        if body.tool_choice == "none" or not is_strict:
            return None
        if self.tool_parser.has_template:
            why = "the model writes tool calls in a form of its own; leave strict out of its tools."
            raise ApiError(400, why, "tools")
        parameters = strict_parameters(functions)
        _require_short_schema(json.dumps(parameters), "tools")
        return await self._compiled(partial(XGrammar.from_tool_calls, parameters), "tools")

    async def _compiled(self, compile_it: Callable[..., XGrammar], param: str) -> XGrammar:
        """Compile a grammar on its thread; raise 400 if that fails or xgrammar is missing."""
        vocab_size = self.manager.limits.vocab_size()
        try:
            return await on_thread(self._grammar_thread, compile_it, self._compiling, vocab_size)
        except (ImportError, InvalidRequestError) as error:
            raise ApiError(400, f"{param}: {error}", param) from error

    async def prompt_logprobs(
        self, prompts: Sequence[list[int]], num: int, temperature: float, adapter: str | None
    ) -> list[list[dict[int, tuple[float, int]]]]:
        """Score each prompt in a separate plain forward between two steps of the engine."""

        def score(prompt: list[int]) -> list[dict[int, tuple[float, int]]]:
            with self.manager.loop.paused(runs_module=True):
                return prompt_logprobs(self.manager.engine, prompt, temperature, num, adapter)

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
        """Queue the sequences of prompts; sequences of the same prompt are adjacent.

        Args:
            prompts: token ids, with images if there are any.
            params: sampling parameters of all sequences.
            n: number of sequences per prompt.
            is_streaming: True: unfinished sequences are delivered too, after each step.
            client_id: the client's name for the request; None: it has no name.
            session_id: name of the session that records the outputs; None: they are not recorded.

        Raises:
            ApiError: the request exceeds a limit of the server, or there is no such session.
            RolloutError: the engine refuses the request.
        """
        self.require_ready()
        self.require_few(len(prompts), n)
        session = None if session_id is None else self.sessions.get(session_id)
        longest = max(map(_num_tokens, prompts))
        limit = self.options.max_prompt_tokens
        if limit is not None and longest > limit:
            raise ApiError(400, f"the prompt has {longest} tokens; {limit} are allowed.", "prompt")
        create = partial(self.manager.create_requests, members=range(n), is_streaming=is_streaming)
        each = [params] * len(prompts)
        if any(map(_has_images, prompts)) or params.adapter is not None:
            # Creating requests runs a forward for the first pictures, and for an adapter's first
            # sequence.
            try:
                requests = await on_thread(self._encoder_thread, create, prompts, each)
            except ConfigurationError as error:
                if params.adapter is not None:
                    raise ApiError(400, str(error), "model") from error
                why = f"the model runs no such pictures here: {error}"
                raise ApiError(400, why, "messages") from error
        else:
            requests = create(prompts, each)
        for request in requests:
            request.group = _group_of(request)
        submission = self.output_router.submit(requests, client_id, session)
        if client_id is not None and self.control.is_blocked(client_id):
            await self.control.abort([client_id])
        return submission


def _num_tokens(prompt: Encoded) -> int:
    if isinstance(prompt, ImagePrompt):
        return len(prompt.token_ids)
    return len(prompt)


def _has_images(prompt: Encoded) -> bool:
    return isinstance(prompt, ImagePrompt) and prompt.num_images > 0


def _require_short_schema(text: str, param: str) -> None:
    size = len(text)
    if size > MAX_SCHEMA_CHARACTERS:
        why = f"the JSON schema has {size:,} characters of {MAX_SCHEMA_CHARACTERS:,}."
        raise ApiError(400, why, param)


def _group_of(request: Request) -> int:
    """Return a group number from prompt and adapter, below all numbers of the input processor.

    Equal prompts that wait together are prefilled once, even from different clients.
    """
    pictures = b"" if request.images is None else request.images.digest
    token_ids = array("q", request.prompt_ids).tobytes()
    adapter = repr(request.params.adapter).encode()
    digest = hashlib.blake2b(token_ids + pictures + adapter, digest_size=16).digest()
    return -1 - int.from_bytes(digest)
