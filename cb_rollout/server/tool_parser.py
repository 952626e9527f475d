"""Tool calls: parsed from a model's answer, or required of it by a grammar.

A call is read by the tokenizer's own `response_template`, else as
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which most chat templates teach. Only
calls of the second form can be required: in other answers they cannot be told from text with
certainty.
"""

import json
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cb_rollout.rollout.prompts import ENCODING_FAULTS
from cb_rollout.server.detokenizer import num_partial_match
from cb_rollout.server.protocol import ApiError, NamedToolChoice, Tool

OPENING = "<tool_call>"
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)

# Placeholders that a chat template renders, to learn its call format.
NAME, KEY, VALUE = "a_function_to_call", "an_argument", "a_value"


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

    def message(
        self, text: str, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: list[Any]
    ) -> dict[str, Any]:
        """Return the assistant's message; calls that cannot be parsed stay text."""
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
            return {"role": "assistant", "content": text}
        identified = [
            {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": call}
            for call in calls
        ]
        return {"role": "assistant", "content": content, "tool_calls": identified}


def _call(entry: Any) -> dict[str, str]:
    name, arguments = entry["name"], entry.get("arguments", {})
    if not isinstance(name, str):
        raise TypeError(f"a tool's name is {name!r}")
    if not isinstance(arguments, str):
        # Formatted as transformers' templates do, so that a call sent back is the same text.
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": arguments}


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text around a call's name and its arguments."""

    before_name: str
    between: str
    after_arguments: str


def call_format(tokenizer: Any) -> CallFormat | None:
    """Return the call format of the tokenizer's chat template; None if it is not tagged JSON."""
    if getattr(tokenizer, "response_template", None) is not None:
        return None
    arguments = {KEY: VALUE}
    function = {"name": NAME, "arguments": arguments}
    call = {"type": "function", "id": "call_0", "function": function}
    try:
        text = tokenizer.apply_chat_template(
            [
                {"role": "user", "content": ""},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ],
            tools=[{"type": "function", "function": {"name": NAME, "parameters": {}}}],
            tokenize=False,
        )
    except ENCODING_FAULTS:
        return None
    # The last match: a template may begin with an example of a call.
    written = CALL.match(text, max(0, text.rfind(OPENING)))
    if written is None:
        return None
    before_name, found_name, rest = written[0].partition(json.dumps(NAME))
    between, found_arguments, after = rest.partition(json.dumps(arguments))
    return CallFormat(before_name, between, after) if found_name and found_arguments else None


def required_calls(
    form: CallFormat | None, tools: Sequence[Tool] | None, choice: NamedToolChoice | str | None
) -> tuple[tuple[str, str, str], ...]:
    """Return the calls, of which an answer must make one; nothing if `tool_choice` requires none.

    Returns:
        For each call its text before the arguments, their JSON schema, and the text after.

    Raises:
        ApiError: a call is required, and there is no such tool or the format is not known.
    """
    if choice in (None, "auto", "none"):
        return ()
    functions = {tool.function.name: tool.function for tool in tools or ()}
    if not functions:
        raise ApiError(400, "tool_choice insists on a call, and there are no tools.", "tool_choice")
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in functions:
            why = f"tool_choice: {name!r:.100} is not among the tools."
            raise ApiError(400, why, "tool_choice")
        functions = {name: functions[name]}
    if form is None:
        raise ApiError(
            400,
            "tool_choice can be auto or none only: the model's chat template does not write calls "
            "as JSON in <tool_call> tags, so they cannot be enforced.",
            "tool_choice",
        )
    # OpenAI's protocol: a function without `parameters` takes none.
    nothing: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    return tuple(
        (
            f"{form.before_name}{json.dumps(name)}{form.between}",
            json.dumps(function.parameters or nothing),
            form.after_arguments,
        )
        for name, function in functions.items()
    )
