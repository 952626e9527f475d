"""Tool calls, parsed from a model's answer.

A call is read by the tokenizer's own `response_template`, else as
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which most chat templates teach.
"""

import json
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cb_rollout.server.detokenizer import num_partial_match

OPENING = "<tool_call>"
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ToolParser:
    """Parses the tool calls of a model's answers; called on one thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_template = getattr(tokenizer, "response_template", None) is not None

    def num_text_characters(self, text: str) -> int:
        """Return how many first characters of an unfinished answer cannot belong to a call."""
        if self._has_template:
            return 0
        start = text.find(OPENING)
        return start if start >= 0 else len(text) - num_partial_match(text, [OPENING])

    def parsed(
        self, text: str, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: list[Any]
    ) -> tuple[str | None, list[dict[str, Any]]]:
        """Return an answer's text and its calls; calls that cannot be parsed stay text."""
        content, calls = None, []
        # An answer that is not in the expected form is text.
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if self._has_template:
                parsed = self._tokenizer.parse_response(
                    list(token_ids), prefix=list(prompt_ids), tools=tools
                )
                content = parsed.get("content")
                calls = [_call(entry["function"]) for entry in parsed.get("tool_calls") or ()]
            else:
                found = list(CALL.finditer(text))
                content = text[: found[0].start()].strip() or None if found else text
                calls = [_call(json.loads(match[1])) for match in found]
        if not calls:
            return text, []
        return content, [
            {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": call}
            for call in calls
        ]


def _call(entry: Any) -> dict[str, str]:
    name, arguments = entry["name"], entry.get("arguments", {})
    if not isinstance(name, str):
        raise TypeError(f"a tool's name is {name!r}")
    if not isinstance(arguments, str):
        # Formatted as transformers' templates do, so that a call sent back is the same text.
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": arguments}
