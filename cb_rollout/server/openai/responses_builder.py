"""Build answers of `/v1/responses`, whole or as typed events, from a chat's answers.

Called on the server's asyncio thread.
"""

import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from cb_rollout.errors import RolloutError
from cb_rollout.server.openai.builders import ChatResponseBuilder, ResponseBuilder
from cb_rollout.server.openai.responses_body import ResponsesRequest
from cb_rollout.server.prompt_encoder import EncodedChat
from cb_rollout.server.protocol import ApiError, as_api_error
from cb_rollout.types import GenerationOutput

# Status of a response and of its last item, and the last event, by the chat's finish reason.
ENDS = {
    "length": ("incomplete", "incomplete", "response.incomplete"),
    "abort": ("cancelled", "incomplete", "response.incomplete"),
}
COMPLETED = ("completed", "completed", "response.completed")

# Names of fields in a chat's errors, and the names of the same fields in this body.
RENAMED = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
}
# A message's number differs from its item's: instructions come first, and calls are joined.
_RENAMED_WORD = re.compile(rf"\b({'|'.join(RENAMED)})\b(?:\.\d+)?")


@contextmanager
def in_responses_words() -> Iterator[None]:
    """Rename the fields in a chat's errors to those of `/v1/responses`."""
    try:
        yield
    except (ApiError, RolloutError) as error:
        raised = as_api_error(error)
        param = raised.param and _renamed(raised.param)
        raise ApiError(raised.status, _renamed(raised.message), param) from error


def _renamed(text: str) -> str:
    return _RENAMED_WORD.sub(lambda match: RENAMED[match[1]], text)


class ResponsesBuilder(ResponseBuilder):
    """Build a response of `/v1/responses` from the chat's response."""

    body: ResponsesRequest
    end_of_stream = ""
    num_choices = 1

    def __init__(
        self, chat: ChatResponseBuilder, body: ResponsesRequest, encoded: EncodedChat
    ) -> None:
        super().__init__(chat.model, body, [encoded.token_ids])
        self._chat = chat
        self._id = f"resp_{uuid.uuid4().hex}"
        self._num_events = 0
        self._items: list[dict[str, Any]] = []

    def whole(self, outputs: list[GenerationOutput]) -> dict[str, Any]:
        choice = self._chat.whole(outputs)["choices"][0]
        status, item_status, _ = ENDS.get(choice["finish_reason"], COMPLETED)
        message = choice["message"]
        calls = message.get("tool_calls", [])
        items = []
        if message["content"] or not calls:
            content = [_text_part(message["content"] or "", _logprobs_of(choice))]
            items.append(_message_item(_new_id("msg"), item_status, content))
        for call in calls:
            items.append(_call_item(_new_id("fc"), call, call["function"]["arguments"]))
        usage = self._token_counts(len(outputs[0].generated_tokens))
        return self._response(status, items, usage)

    async def stream(
        self, updates: AsyncIterator[tuple[int, GenerationOutput]]
    ) -> AsyncIterator[dict[str, Any]]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress", [], None))
        message = _StreamedMessage(self)
        async for chunk in self._chat.stream(updates):
            choice = chunk["choices"][0]
            text = choice["delta"].get("content", "")
            logprobs = _logprobs_of(choice)
            if text or logprobs:
                for event in message.push(text, logprobs):
                    yield event
            if choice["finish_reason"] is not None:
                for event in self._last_events(choice, message):
                    yield event

    def _last_events(
        self, choice: dict[str, Any], message: "_StreamedMessage"
    ) -> Iterator[dict[str, Any]]:
        """Yield the end of a message, the calls after it, and the end of the response."""
        calls = choice["delta"].get("tool_calls", [])
        status, item_status, last_event = ENDS.get(choice["finish_reason"], COMPLETED)
        if message.is_open or not calls:
            yield from message.finish(item_status)
        for call in calls:
            yield from self._call_events(call)
        usage = self._token_counts(self._chat.num_tokens_sent)
        yield self._event(last_event, response=self._response(status, self._items, usage))

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        message = _renamed(error.message)
        failed = self._response("failed", self._items, None)
        failed["error"] = {"code": "server_error", "message": message}
        code = error.body["error"]["code"]
        return [
            self._event("error", code=code, message=message, param=error.param),
            self._event("response.failed", response=failed),
        ]

    def _call_events(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a tool call, which is sent whole."""
        arguments = call["function"]["arguments"]
        item_id = _new_id("fc")
        at = {"output_index": len(self._items)}
        begun = _call_item(item_id, call, "") | {"status": "in_progress"}
        yield self._event("response.output_item.added", **at, item=begun)
        name = "response.function_call_arguments"
        yield self._event(f"{name}.delta", item_id=item_id, **at, delta=arguments)
        function = call["function"]["name"]
        yield self._event(f"{name}.done", item_id=item_id, **at, name=function, arguments=arguments)
        item = _call_item(item_id, call, arguments)
        self._items.append(item)
        yield self._event("response.output_item.done", **at, item=item)

    def _event(self, event_type: str, /, **fields: Any) -> dict[str, Any]:
        event = {"type": event_type, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event

    def _token_counts(self, num_output_tokens: int) -> dict[str, Any]:
        num_input_tokens = len(self._prompts[0])
        num_cached = self.num_cached_tokens
        return {
            "input_tokens": num_input_tokens,
            "input_tokens_details": {
                "cached_tokens": num_cached,
                "cache_write_tokens": num_input_tokens - num_cached,
            },
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input_tokens + num_output_tokens,
        }

    def _response(
        self, status: str, items: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the response so far, with the settings that were actually used."""
        body = self.body
        params = self._chat.params
        is_cut = status == "incomplete"
        has_ended = status not in ("in_progress", "failed")
        text_format: dict[str, Any] = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            text_format = body.text.format.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._heading["created"],
            "completed_at": int(time.time()) if has_ended else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._heading["model"],
            "output": list(items),
            "usage": usage,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "max_output_tokens": body.max_output_tokens,
            "temperature": 0.0 if params.is_greedy else params.temperature,
            "top_p": params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": text_format},
            "tools": [_shown_tool(tool) for tool in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": None, "summary": None},
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
        }


class _StreamedMessage:
    """The message of a streamed response, opened by its first text."""

    def __init__(self, builder: ResponsesBuilder) -> None:
        self._builder = builder
        self._at = {"item_id": _new_id("msg"), "output_index": 0, "content_index": 0}
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self.is_open = False

    def _event(self, event_type: str, **fields: Any) -> dict[str, Any]:
        return self._builder._event(event_type, **fields)

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return _message_item(str(self._at["item_id"]), status, content)

    def _open(self) -> Iterator[dict[str, Any]]:
        self.is_open = True
        item = self._item("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._at, part=_text_part("", []))

    def push(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Append text to the message, and yield its events."""
        if not self.is_open:
            yield from self._open()
        self._text += text
        self._logprobs += logprobs
        yield self._event("response.output_text.delta", **self._at, delta=text, logprobs=logprobs)

    def finish(self, status: str) -> Iterator[dict[str, Any]]:
        """Yield the events of the message's end, and add its item to the response."""
        if not self.is_open:
            yield from self._open()
        logprobs = self._logprobs
        yield self._event(
            "response.output_text.done", **self._at, text=self._text, logprobs=logprobs
        )
        part = _text_part(self._text, logprobs)
        yield self._event("response.content_part.done", **self._at, part=part)
        item = self._item(status, [part])
        self._builder._items.append(item)
        yield self._event("response.output_item.done", output_index=0, item=item)


def _logprobs_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if choice["logprobs"] is None else choice["logprobs"]["content"]


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _call_item(item_id: str, call: dict[str, Any], arguments: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": arguments,
        "status": "completed",
    }


def _shown_tool(tool: Any) -> dict[str, Any]:
    shown = tool.model_dump(include={"type", "name", "description", "parameters"})
    return shown | {"strict": bool(tool.strict)}
