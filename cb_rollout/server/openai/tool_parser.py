"""Tool calls, parsed from a model's answer.

A call is parsed with the tokenizer's `response_template` if it has one; otherwise in the form
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which most chat templates teach.
"""

import json
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cb_rollout.server.detokenizer import num_partial_match
from cb_rollout.server.protocol import ApiError, FunctionDefinition

OPENING = "<tool_call>"
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ToolParser:
    """Parses the tool calls of a model's answers; called on one thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.has_template = getattr(tokenizer, "response_template", None) is not None
        """True: the tokenizer defines its own form of tool calls."""

    def num_text_characters(self, text: str) -> int:
        """Return how many characters at an unfinished answer's start cannot belong to a call."""
        if self.has_template:
            return 0
        start = text.find(OPENING)
        if start >= 0:
            return start
        return len(text) - num_partial_match(text, [OPENING])

    def parsed(
        self, text: str, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: list[Any]
    ) -> tuple[str | None, list[dict[str, Any]]]:
        """Return an answer's text and its calls; calls that cannot be parsed remain in the text."""
        content = None
        functions: list[dict[str, str]] = []
        # An answer that is not in the expected form is text.
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if self.has_template:
                parsed = self._tokenizer.parse_response(
                    list(token_ids), prefix=list(prompt_ids), tools=tools
                )
                content = parsed.get("content")
                entries = [entry["function"] for entry in parsed.get("tool_calls") or ()]
            else:
                content, entries = _calls_in_tags(text)
            functions = [_call(entry) for entry in entries]
        if not functions:
            return text, []
        calls = []
        for function in functions:
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            calls.append({"id": call_id, "type": "function", "function": function})
        return content, calls


def _calls_in_tags(text: str) -> tuple[str | None, list[Any]]:
    """Return the text before the first call, and the JSON of each call."""
    matches = list(CALL.finditer(text))
    if not matches:
        return text, []
    before = text[: matches[0].start()].strip()
    return before or None, [json.loads(match[1]) for match in matches]


def strict_parameters(functions: Sequence[FunctionDefinition]) -> dict[str, Any]:
    """Return the JSON schema of each function's arguments, by name; None: any object.

    A strict function without a schema takes no arguments.
    """
    schemas: dict[str, Any] = {}
    for function in functions:
        if function.name in schemas:
            raise ApiError(400, f"two tools are named {function.name!r:.100}; rename one.", "tools")
        schema = None
        if function.strict:
            schema = function.parameters or NO_ARGUMENTS
        schemas[function.name] = schema
    return schemas


def _call(entry: Any) -> dict[str, str]:
    name = entry["name"]
    arguments = entry.get("arguments", {})
    if not isinstance(name, str):
        raise TypeError(f"a tool's name is {name!r}")
    if not isinstance(arguments, str):
        # Formatted as in transformers' templates, so that a call sent back gives the same text.
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": arguments}
