"""Build responses to completions, chats and token ids, whole or as streamed chunks.

Called on the server's asyncio thread.
"""

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.server.detokenizer import IncrementalDetokenizer, logprob_entries
from cb_rollout.server.output_router import Submission
from cb_rollout.server.prompt_encoder import EncodedChat
from cb_rollout.server.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    TokenRequest,
)
from cb_rollout.server.served_model import ServedModel
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus


class ResponseBuilder:
    """Build a request's response; a subclass defines the shape of a choice."""

    body: Any
    num_choices: int
    """Number of sequences per prompt."""
    end_of_stream = "data: [DONE]\n\n"
    """Sent after the last event."""
    _shows_tokens = True
    """True: a chunk that has tokens but no text is sent too."""
    _submission: Submission | None = None

    def __init__(
        self, model: ServedModel, body: Any, prompts: list[list[int]], **heading: str
    ) -> None:
        self.model, self.body, self._prompts = model, body, prompts
        # A client may use the name under which it launched the model.
        name = body.model or model.options.model_name
        self._heading = {**heading, "created": int(time.time()), "model": name}
        self._num_sent: dict[int, int] = defaultdict(int)
        self._prompt: dict[str, Any] = {}
        """Fields of the response and of its first chunks that repeat the prompt."""

    def begin(self, submission: Submission) -> None:
        """Take the request's sequences, once they are queued."""
        self._submission = submission

    @property
    def num_cached_tokens(self) -> int:
        """Return the number of prompt tokens whose keys were cached when the prefill began."""
        return 0 if self._submission is None else self._submission.num_cached_tokens

    @property
    def num_tokens_sent(self) -> int:
        """Return the number of tokens that a stream has sent, of all sequences."""
        return sum(self._num_sent.values())

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the last events of a stream that ends with an error."""
        return [error.body]

    async def score_prompts(self) -> None:
        """Compute the prompts' log-probabilities, if the request asks for them."""

    def whole(self, outputs: list[GenerationOutput]) -> dict[str, Any]:
        choices = []
        num_tokens = 0
        for index, output in enumerate(outputs):
            choices.append({"index": index, **self._choice(index, output, 0)})
            num_tokens += len(output.generated_tokens)
        usage = self._usage(num_tokens)
        return {**self._heading, **self._prompt, "choices": choices, "usage": usage}

    async def stream(
        self, updates: AsyncIterator[tuple[int, GenerationOutput]]
    ) -> AsyncIterator[dict[str, Any]]:
        for chunk in self._first_chunks():
            yield chunk
        async for index, output in updates:
            start = self._num_sent[index]
            num_tokens = len(output.generated_tokens)
            self._num_sent[index] = num_tokens
            choice = self._choice(index, output, start)
            has_tokens = self._shows_tokens and start < num_tokens
            if has_tokens or output.is_finished() or choice.get("text") or choice.get("delta"):
                yield {**self._heading, "choices": [{"index": index, **choice}]}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            usage = self._usage(self.num_tokens_sent)
            yield {**self._heading, "choices": [], "usage": usage}

    def _first_chunks(self) -> list[dict[str, Any]]:
        return []

    def _choice(self, index: int, output: GenerationOutput, start: int) -> dict[str, Any]:
        """Return a sequence's choice for the tokens from `start`."""
        raise NotImplementedError

    def _usage(self, num_completion_tokens: int) -> dict[str, int]:
        num_prompt_tokens = sum(map(len, self._prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
        }


class TokenResponseBuilder(ResponseBuilder):
    """Build a response of `/inference/v1/generate`: tokens are ids, which the client decodes."""

    body: TokenRequest

    def __init__(self, model: ServedModel, body: TokenRequest, client_id: str | None) -> None:
        name = client_id or uuid.uuid4().hex
        super().__init__(model, body, [body.token_ids], request_id=name, output_mode="tokens")
        self.num_choices = body.sampling_params.n
        self._prompt = {"prompt_token_ids": body.token_ids if body.return_token_ids else None}

    def _first_chunks(self) -> list[dict[str, Any]]:
        if not self.body.return_token_ids:
            return []
        return [{**self._heading, **self._prompt, "choices": []}]

    def _choice(self, index: int, output: GenerationOutput, start: int) -> dict[str, Any]:
        logprobs = None
        if self.body.sampling_params.logprobs is not None:
            logprobs = {"content": logprob_entries(output, start, _id_entry)}
        choice = {"finish_reason": _finish_reason(output), "logprobs": logprobs}
        return choice | _ids(output, start)


class _TextResponseBuilder(ResponseBuilder):
    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(
        self, model: ServedModel, body: Any, prompts: list[list[int]], params: SamplingParams
    ) -> None:
        kind = self.chunk_kind if body.stream else self.kind
        response_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        super().__init__(model, body, prompts, id=response_id, object=kind)
        self.params = params
        self.num_choices = body.n or 1
        self._with_logprobs = body.logprobs is not None and body.logprobs is not False
        self._shows_tokens = body.return_token_ids or self._with_logprobs
        self._as_ids = body.return_tokens_as_token_ids
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}
        self._num_characters: dict[int, int] = defaultdict(int)

    def _text(self, index: int, output: GenerationOutput, start: int) -> str:
        """Return a sequence's text of the tokens from `start`, without the stop string at its end.

        In an unfinished text, characters that the next token may change are withheld.
        """
        decode = self.model.decode
        is_stopped = output.finish_reason is FinishReason.STOP
        if start == 0 and output.is_finished() and not (self.params.stop and is_stopped):
            return decode(output.generated_tokens)
        if index not in self._detokenizers:
            self._detokenizers[index] = IncrementalDetokenizer(decode, self.params.stop)
        text = self._detokenizers[index].push(output.generated_tokens[start:])
        if output.is_finished():
            text += self._detokenizers[index].finish(is_stopped=is_stopped)
        return text


class CompletionResponseBuilder(_TextResponseBuilder):
    """Build a response of `/v1/completions`."""

    body: CompletionRequest
    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"
    _prompt_logprobs: Sequence[list[dict[str, Any] | None]] = ()

    async def score_prompts(self) -> None:
        num_likeliest = self.body.prompt_logprobs
        if num_likeliest is None:
            return
        temperature = 1.0 if self.params.is_greedy else self.params.temperature
        scored = await self.model.prompt_logprobs(
            self._prompts, num_likeliest, temperature, self.params.adapter
        )
        # The first token follows nothing.
        self._prompt_logprobs = [[None, *map(_ranked, places)] for places in scored]

    def _choice(self, index: int, output: GenerationOutput, start: int) -> dict[str, Any]:
        text = self._text(index, output, start)
        logprobs = None
        if self._with_logprobs:
            logprobs, self._num_characters[index] = self.model.tokens.completion_logprobs(
                output, start, self._num_characters[index], self._as_ids
            )
        choice = {"text": text, "finish_reason": _finish_reason(output), "logprobs": logprobs}
        if self.body.return_token_ids:
            choice |= _ids(output, start)
            if start == 0:
                choice["prompt_token_ids"] = self._prompts[index // self.num_choices]
        if self._prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs[index // self.num_choices]
        return choice


class ChatResponseBuilder(_TextResponseBuilder):
    """Build a response of `/v1/chat/completions`."""

    body: ChatCompletionRequest
    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, model: ServedModel, body: Any, chat: EncodedChat, params: SamplingParams, tools: Any
    ) -> None:
        """Answer a chat.

        Args:
            model: the served model, which decodes tokens and parses tool calls.
            body: the request's body, a `ChatCompletionRequest`.
            chat: the encoded messages.
            params: the sampling parameters.
            tools: tools that may be called, in the chat template's form; None: none may be called.
        """
        super().__init__(model, body, [chat.token_ids], params)
        self._chat = chat
        self._tools = tools
        if body.return_token_ids:
            self._prompt = {"prompt_token_ids": chat.token_ids}
        self._texts: dict[int, str] = defaultdict(str)
        self._num_text_sent: dict[int, int] = defaultdict(int)

    def _first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        chunks = []
        for index in range(self.num_choices):
            choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
            chunks.append({**self._heading, "choices": [choice], **self._prompt})
        return chunks

    def _choice(self, index: int, output: GenerationOutput, start: int) -> dict[str, Any]:
        if output.is_finished():
            self.model.remember(self._chat, output.generated_tokens)
        content, calls = self._said(index, self._text(index, output, start), output)
        choice: dict[str, Any] = {}
        if self.body.stream:
            choice["delta"] = _delta(content, calls)
        else:
            choice["message"] = {"role": "assistant", "content": content}
            if calls:
                choice["message"]["tool_calls"] = calls
        choice["finish_reason"] = "tool_calls" if calls else _finish_reason(output)
        choice["logprobs"] = None
        if self._with_logprobs:
            choice["logprobs"] = self.model.tokens.chat_logprobs(output, start, self._as_ids)
        if self.body.return_token_ids:
            choice |= _ids(output, start)
        return choice

    def _said(
        self, index: int, text: str, output: GenerationOutput
    ) -> tuple[str | None, list[dict[str, Any]]]:
        """Return the text and the tool calls to send after a sequence's new text.

        Text is sent as soon as it cannot belong to a call; calls are sent whole, at the end.
        """
        if not self._tools:
            return text, []
        parser = self.model.tool_parser
        self._texts[index] += text
        whole = self._texts[index]
        num_sent = self._num_text_sent[index]
        if not output.is_finished():
            num_certain = parser.num_text_characters(whole)
            self._num_text_sent[index] = max(num_sent, num_certain)
            return whole[num_sent:num_certain], []
        tokens = output.generated_tokens
        content, calls = parser.parsed(whole, tokens, self._prompts[0], self._tools)
        if not calls:
            return whole[num_sent:], []
        if num_sent:
            # The text before the calls was already sent.
            content = None
        return content, calls


def _delta(content: str | None, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a chunk, with numbered tool calls."""
    delta: dict[str, Any] = {}
    if content:
        delta["content"] = content
    if calls:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    return delta


def _ids(output: GenerationOutput, start: int) -> dict[str, Any]:
    """Return token ids and runs of policy versions of a sequence's tokens from `start`."""
    runs = []
    num_before = start
    for version, count in output.policy_versions:
        if count > num_before:
            runs.append([version, count - num_before])
        num_before = max(0, num_before - count)
    return {"token_ids": output.generated_tokens[start:], "policy_versions": runs}


def _id_entry(token_id: int, logprob: float) -> dict[str, Any]:
    # TRL 1.16 and renderers 0.1.12 read `token`; vLLM 0.32 writes `token_id`.
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob}


def _ranked(place: dict[int, tuple[float, int]]) -> dict[str, Any]:
    ranked = {}
    for token_id, (logprob, rank) in place.items():
        ranked[str(token_id)] = {"logprob": logprob, "rank": rank}
    return ranked


def _finish_reason(output: GenerationOutput) -> str | None:
    """Return why a sequence ended; None if it is still running."""
    if output.status is RequestStatus.CANCELLED:
        # vLLM's word.
        return "abort"
    return output.finish_reason
