"""A model's answer as a message: its text, and the tools that it calls.

Owns how calls are told from text: by the tokenizer's own `response_template` where it has one, else
as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which most chat templates teach.
"""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from cb_rollout.server.text import doubtful

OPENING = "<tool_call>"
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ToolReader:
    """Reads the calls out of answers, on one thread."""

    def __init__(self, tokenizer: Any) -> None:
        """Take the tokenizer, which may know its own model's way."""
        self._tokenizer = tokenizer
        self._has_own_way = getattr(tokenizer, "response_template", None) is not None

    def num_certain(self, text: str) -> int:
        """How much of an unfinished answer is surely no call."""
        if self._has_own_way:
            return 0
        start = text.find(OPENING)
        return start if start >= 0 else len(text) - doubtful(text, [OPENING])

    def message(
        self, text: str, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: list[Any]
    ) -> dict[str, Any]:
        """The assistant's message; calls that cannot be read stay text."""
        if self._has_own_way:
            content, calls = self._read_own_way(text, token_ids, prompt_ids, tools)
        else:
            content, calls = _read_tagged(text)
        message: dict[str, Any] = {"role": "assistant", "content": content if calls else text}
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": call}
                for call in calls
            ]
        return message

    def _read_own_way(
        self, text: str, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: list[Any]
    ) -> tuple[str | None, list[dict[str, str]]]:
        try:
            parsed = self._tokenizer.parse_response(
                list(token_ids), prefix=list(prompt_ids), tools=tools
            )
            calls = [_call(entry["function"]) for entry in parsed.get("tool_calls") or ()]
        except (ValueError, KeyError, TypeError, AttributeError):
            # An answer that is not in the model's own form is text.
            return text, []
        return parsed.get("content"), calls


def _read_tagged(text: str) -> tuple[str | None, list[dict[str, str]]]:
    found = list(CALL.finditer(text))
    try:
        calls = [_call(json.loads(match[1])) for match in found]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text, []
    content = text[: found[0].start()].strip() if found else text
    return content or None, calls


def _call(entry: Any) -> dict[str, str]:
    name, arguments = entry["name"], entry.get("arguments", {})
    if not isinstance(name, str):
        raise TypeError(f"a tool's name is {name!r}")
    if not isinstance(arguments, str):
        # As transformers' templates write it, so that a call sent back is the same text.
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": arguments}
