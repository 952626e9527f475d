"""Tool calls that a client insists on: how the model's own template writes one, and its grammar.

Owns what a forced answer looks like: one call, in exactly the words of the template, with arguments
that obey the function's schema. Refuses templates whose calls are not JSON in `<tool_call>` tags,
because the calls in other answers could not be read with certainty.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cb_rollout.rollout.prompts import ENCODING_FAULTS
from cb_rollout.server.errors import ApiError
from cb_rollout.server.schemas import NamedToolChoice, Tool
from cb_rollout.server.tools import CALL, OPENING

NAME, KEY, VALUE = "a_function_to_call", "an_argument", "a_value"
# What the template is made to write, to see how it writes.


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text around a call's name and its arguments."""

    before_name: str
    between: str
    after_arguments: str

    def around(self, name: str) -> tuple[str, str]:
        """What stands before and after the arguments of a call."""
        return f"{self.before_name}{json.dumps(name)}{self.between}", self.after_arguments


def call_format(tokenizer: Any) -> CallFormat | None:
    """How the tokenizer's chat template writes calls; None: not as tagged JSON."""
    if getattr(tokenizer, "response_template", None) is not None:
        return None
    arguments = {KEY: VALUE}
    function = {"name": NAME, "arguments": arguments}
    try:
        text = tokenizer.apply_chat_template(
            [
                {"role": "user", "content": ""},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "id": "call_0", "function": function}],
                },
            ],
            tools=[{"type": "function", "function": {"name": NAME, "parameters": {}}}],
            tokenize=False,
        )
    except ENCODING_FAULTS:
        return None
    # The last one: a template may show the model an example of a call.
    written = CALL.match(text, max(0, text.rfind(OPENING)))
    return None if written is None else _split(written[0], arguments)


def _split(written: str, arguments: dict[str, str]) -> CallFormat | None:
    """The parts of a call's text that do not change from call to call."""
    before_name, found_name, rest = written.partition(json.dumps(NAME))
    between, found_arguments, after = rest.partition(json.dumps(arguments))
    is_whole = found_name and found_arguments
    return CallFormat(before_name, between, after) if is_whole else None


def forced_calls(
    made: CallFormat | None,
    tools: Sequence[Tool] | None,
    choice: NamedToolChoice | str | None,
) -> tuple[tuple[str, str, str], ...]:
    """The calls that an answer must be one of, each as text before, JSON schema, and text after.

    Returns:
        Nothing where no call is insisted on.

    Raises:
        ApiError: a call is insisted on and there is none, or the template's way is not known.
    """
    if choice in (None, "auto", "none"):
        return ()
    functions = {tool.function.name: tool.function for tool in tools or ()}
    if not functions:
        raise ApiError(400, "tool_choice insists on a call, and there are no tools.", "tool_choice")
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in functions:
            raise ApiError(
                400, f"tool_choice: {name!r:.100} is not among the tools.", "tool_choice"
            )
        functions = {name: functions[name]}
    if made is None:
        raise ApiError(
            400,
            "tool_choice can be auto or none only: the model's chat template does not write calls "
            "as JSON in <tool_call> tags, so they cannot be enforced.",
            "tool_choice",
        )
    # No parameters are an empty list of them, as OpenAI says.
    nothing: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    calls = []
    for name, function in functions.items():
        before, after = made.around(name)
        calls.append((before, json.dumps(function.parameters or nothing), after))
    return tuple(calls)
