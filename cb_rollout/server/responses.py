"""Responses of `/v1/completions` and `/v1/chat/completions`, whole and as streamed chunks.

Called on the server's asyncio thread.
"""

import time
import uuid
from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.server.detokenizer import IncrementalDetokenizer, cut_at_stop
from cb_rollout.server.errors import ApiError
from cb_rollout.server.prompt_encoder import EncodedChat
from cb_rollout.server.protocol import ChatCompletionRequest, CompletionRequest
from cb_rollout.server.served_model import ServedModel
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus


class ResponseBuilder:
    """Build one request's response; a subclass defines the shape of a choice.

    Args:
        model: the model that answers.
        body: the request.
        prompts: token ids of each prompt; each has `n` sequences.
        params: how the sequences are sampled.
    """

    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(
        self,
        model: ServedModel,
        body: CompletionRequest | ChatCompletionRequest,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        self._model, self._prompts, self._params = model, prompts, params
        self._num_choices = body.n or 1
        self._with_ids = body.return_token_ids
        self._names_ids = body.return_tokens_as_token_ids
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._heading = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.options.model_name,
        }
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}
        self._num_sent: dict[int, int] = {}

    def whole(self, outputs: list[GenerationOutput]) -> dict[str, Any]:
        """Return the response to a request whose sequences have all ended."""
        choices = [
            {"index": index, **self._choice(index, output)} for index, output in enumerate(outputs)
        ]
        return {
            **self._heading,
            "object": self.kind,
            "choices": choices,
            "usage": self._usage(sum(len(output.generated_tokens) for output in outputs)),
        }

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks that open a stream."""
        return []

    def chunks(self, index: int, output: GenerationOutput) -> list[dict[str, Any]]:
        """Return the chunks for a sequence's newest state."""
        raise NotImplementedError

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks that close a stream."""
        if not self._with_usage:
            return []
        usage = self._usage(sum(self._num_sent.values()))
        return [{**self._heading, "object": self.chunk_kind, "choices": [], "usage": usage}]

    def _choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, index: int, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        choices = [{"index": index, **choice}]
        return {**self._heading, "object": self.chunk_kind, "choices": choices, **more}

    def _text(self, output: GenerationOutput) -> str:
        """Return a finished sequence's text, without the stop string that ended it."""
        decode, tokens = self._model.decode, output.generated_tokens
        text, stops = decode(tokens), self._params.stop
        if not stops or output.finish_reason is not FinishReason.STOP:
            return text
        return cut_at_stop(text, len(IncrementalDetokenizer(decode).push(tokens[:-1])), stops)

    def _new_text(self, index: int, output: GenerationOutput) -> tuple[str, int]:
        """Return a sequence's new text, and the index of the first new token."""
        if index not in self._detokenizers:
            self._detokenizers[index] = IncrementalDetokenizer(
                self._model.decode, self._params.stop
            )
        detokenizer, start = self._detokenizers[index], self._num_sent.get(index, 0)
        text = detokenizer.push(output.generated_tokens[start:])
        if output.is_finished():
            text += detokenizer.finish(is_stopped=output.finish_reason is FinishReason.STOP)
        self._num_sent[index] = len(output.generated_tokens)
        return text, start

    def _ids(self, output: GenerationOutput, start: int = 0) -> dict[str, Any]:
        """Return token ids and policy versions of the tokens from `start`, if asked for."""
        if not self._with_ids:
            return {}
        return ids(output, start)

    def _usage(self, num_completion_tokens: int) -> dict[str, int]:
        num_prompt_tokens = sum(map(len, self._prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
        }


class CompletionResponseBuilder(ResponseBuilder):
    """Build a response of `/v1/completions`."""

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        model: ServedModel,
        body: CompletionRequest,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        super().__init__(model, body, prompts, params)
        self._with_logprobs = body.logprobs is not None
        self._num_characters: dict[int, int] = {}

    def chunks(self, index: int, output: GenerationOutput) -> list[dict[str, Any]]:
        """Return the chunks for a sequence's newest state."""
        text, start = self._new_text(index, output)
        has_tokens = self._with_ids or self._with_logprobs
        if not text and not has_tokens and not output.is_finished():
            return []
        logprobs = None
        if self._with_logprobs:
            num_before = self._num_characters.get(index, 0)
            logprobs = self._model.tokens.completion_logprobs(
                output, start, num_before, self._names_ids
            )
            texts = self._model.tokens.texts(output.generated_tokens[start:])
            self._num_characters[index] = num_before + sum(map(len, texts))
        choice = {
            "text": text,
            "finish_reason": finish_reason(output),
            "logprobs": logprobs,
            **self._ids(output, start),
        }
        if start == 0:
            choice |= self._prompt(index)
        return [self._chunk(index, choice)]

    def _choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs:
            logprobs = self._model.tokens.completion_logprobs(output, as_ids=self._names_ids)
        return {
            "text": self._text(output),
            "finish_reason": finish_reason(output),
            "logprobs": logprobs,
            **self._ids(output),
            **self._prompt(index),
        }

    def _prompt(self, index: int) -> dict[str, Any]:
        if not self._with_ids:
            return {}
        return {"prompt_token_ids": self._prompts[index // self._num_choices]}


class ChatResponseBuilder(ResponseBuilder):
    """Build a response of `/v1/chat/completions`.

    Args:
        model: the model that answers.
        body: the request.
        chat: the prompt.
        params: how the answers are sampled.
        tools: the tools in the prompt; None: none.
    """

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        model: ServedModel,
        body: ChatCompletionRequest,
        chat: EncodedChat,
        params: SamplingParams,
        tools: list[dict[str, Any]] | None,
    ) -> None:
        super().__init__(model, body, [chat.token_ids], params)
        self._chat, self._tools = chat, tools
        self._prompt = {"prompt_token_ids": chat.token_ids} if self._with_ids else {}
        self._with_logprobs = bool(body.logprobs)
        self._texts: dict[int, str] = {}
        self._num_text_sent: dict[int, int] = {}

    def whole(self, outputs: list[GenerationOutput]) -> dict[str, Any]:
        """Return the response to a request whose sequences have all ended."""
        return super().whole(outputs) | self._prompt

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return a chunk with the role for each choice."""
        delta = {"role": "assistant", "content": ""}
        choice = {"delta": delta, "finish_reason": None, "logprobs": None}
        return [self._chunk(index, choice, **self._prompt) for index in range(self._num_choices)]

    def chunks(self, index: int, output: GenerationOutput) -> list[dict[str, Any]]:
        """Return the chunks for a sequence's newest state."""
        text, start = self._new_text(index, output)
        is_last = output.is_finished()
        delta, reason = self._delta(index, text, output)
        has_tokens = (self._with_ids or self._with_logprobs) and start < len(
            output.generated_tokens
        )
        if is_last:
            self._remember(output)
        if not delta and not has_tokens and not is_last:
            return []
        choice = {
            "delta": delta,
            "finish_reason": reason,
            "logprobs": self._logprobs(output, start),
            **self._ids(output, start),
        }
        return [self._chunk(index, choice)]

    def _choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        self._remember(output)
        message = self._message(self._text(output), output)
        return {
            "message": message,
            "finish_reason": "tool_calls" if "tool_calls" in message else finish_reason(output),
            "logprobs": self._logprobs(output, 0),
            **self._ids(output),
        }

    def _delta(
        self, index: int, text: str, output: GenerationOutput
    ) -> tuple[dict[str, Any], str | None]:
        """Return a chunk's delta and its finish reason.

        Text is sent as soon as it cannot belong to a call; calls are sent whole, at the end.
        """
        if not self._tools:
            return ({"content": text} if text else {}), finish_reason(output)
        whole = self._texts[index] = self._texts.get(index, "") + text
        num_sent = self._num_text_sent.get(index, 0)
        if not output.is_finished():
            num_certain = self._model.tool_parser.num_text_characters(whole)
            self._num_text_sent[index] = max(num_sent, num_certain)
            new = whole[num_sent:num_certain]
            return ({"content": new} if new else {}), None
        message = self._message(whole, output)
        calls = message.get("tool_calls")
        if not calls:
            new = whole[num_sent:]
            return ({"content": new} if new else {}), finish_reason(output)
        delta: dict[str, Any] = {
            "tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]
        }
        if not num_sent and message["content"]:
            delta["content"] = message["content"]
        return delta, "tool_calls"

    def _message(self, text: str, output: GenerationOutput) -> dict[str, Any]:
        if not self._tools:
            return {"role": "assistant", "content": text}
        return self._model.tool_parser.message(
            text, output.generated_tokens, self._prompts[0], self._tools
        )

    def _logprobs(self, output: GenerationOutput, start: int) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return self._model.tokens.chat_logprobs(output, start, self._names_ids)

    def _remember(self, output: GenerationOutput) -> None:
        self._model.remember(self._chat, output.generated_tokens)


def ids(output: GenerationOutput, start: int = 0) -> dict[str, Any]:
    """Return token ids and runs of policy versions of a sequence's tokens from `start`."""
    runs, num_before = [], start
    for version, count in output.policy_versions:
        if count > num_before:
            runs.append([version, count - num_before])
        num_before = max(0, num_before - count)
    return {"token_ids": output.generated_tokens[start:], "policy_versions": runs}


def finish_reason(output: GenerationOutput) -> str | None:
    """Return the reason of a sequence's end; None: it goes on."""
    if output.status is RequestStatus.CANCELLED:
        # vLLM's word.
        return "abort"
    return output.finish_reason


def require_generated(output: GenerationOutput, is_aborted: bool = False) -> None:
    """Raise 503 if a sequence failed, or was cancelled and not aborted by a client."""
    if output.status is RequestStatus.CANCELLED and not is_aborted:
        raise ApiError(503, "the request was cancelled by the server; send it again.")
    if output.status is RequestStatus.FAILED:
        raise ApiError(503, f"the sequence could not be generated: {output.error}")
