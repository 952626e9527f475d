"""Prompts to token ids, so that a conversation's next turn begins with the tokens of the last.

A client sends a chat back as text, and text may be tokenized in another way than it was sampled.
So what this server sampled is remembered by its text: where a new chat, through the template,
begins with the text of a known one, it begins with that one's very tokens. Then its keys are found
in the prefix cache, and a trajectory's turns are one sequence. One thread at a time calls it.
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cb_rollout.errors import InvalidRequestError, said
from cb_rollout.rollout.prompts import ENCODING_FAULTS

MAX_KNOWN_TOKENS, MAX_KNOWN = 1 << 20, 1 << 12
# Of all conversations together, and how many: about 10 MB, and a millisecond to look through. The
# longest unused go first.


@dataclass(frozen=True, slots=True)
class Known:
    """What was said in one conversation so far."""

    token_ids: "array[int]"
    """Without the token that ended it."""
    end_text: str
    """Of the token that ended it, which some templates write and others do not."""
    end_ids: tuple[int, ...]


class PromptFormat:
    """Encodes for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Know no conversation yet."""
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._num_known_tokens = 0

    def encode_text(self, text: str) -> list[int]:
        """A prompt that is text, as the tokenizer encodes it for the model."""
        return self._tokenizer(text)["input_ids"]

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[int]]:
        """A chat through the model's own template, up to where the assistant answers.

        Returns:
            Its text, and its token ids.

        Raises:
            InvalidRequestError: there is no template, or it refuses the chat.
        """
        template = getattr(self._tokenizer, "chat_template", None)
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template; send text to /v1/completions."
            )
        if tools and "tools" not in str(template):
            raise InvalidRequestError("the model's chat template knows no tools; leave them out.")
        try:
            text = self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=tools or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except ENCODING_FAULTS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses the messages ({said(error)})."
            ) from error
        return text, self._continued(text)

    def remember(self, prompt_text: str, prompt_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """A chat was answered with these tokens; the next turn may begin with all of them."""
        body, end = tuple(tokens[:-1]), tuple(tokens[-1:])
        body_text, whole_text = self._decode(body), self._decode(tokens)
        if not whole_text.startswith(body_text):
            # A character is torn between the last tokens.
            body, end, body_text = tuple(tokens), (), whole_text
        text = prompt_text + body_text
        known = Known(array("i", [*prompt_ids, *body]), whole_text[len(body_text) :], end)
        self._forget(text)
        self._known[text] = known
        self._num_known_tokens += len(known.token_ids)
        while self._num_known_tokens > MAX_KNOWN_TOKENS or len(self._known) > MAX_KNOWN:
            self._forget(next(iter(self._known)))

    def _forget(self, text: str) -> None:
        if (known := self._known.pop(text, None)) is not None:
            self._num_known_tokens -= len(known.token_ids)

    def _continued(self, text: str) -> list[int]:
        """Token ids of a chat's text, beginning with those of the longest known one."""
        plain = self._encode_part(text)
        beginnings = [known for known in self._known if text.startswith(known)]
        if not beginnings:
            return plain
        beginning = max(beginnings, key=len)
        self._known.move_to_end(beginning)
        known = self._known[beginning]
        token_ids, num_characters = list(known.token_ids), len(beginning)
        if known.end_text and text.startswith(known.end_text, num_characters):
            token_ids += known.end_ids
            num_characters += len(known.end_text)
        token_ids += self._encode_part(text[num_characters:])
        # Some tokenizers change a text that is cut in two: then only the whole is right.
        if self._decode(token_ids) != self._decode(plain):
            return plain
        return token_ids

    def _encode_part(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: its parts joined, its calls' arguments as an object."""
    plain = {name: value for name, value in message.items() if value is not None}
    if isinstance(content := plain.get("content"), list):
        plain["content"] = "".join(part["text"] for part in content)
    plain.setdefault("content", "")
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"])}}
            for call in calls
        ]
    return plain


def _object(function: dict[str, Any]) -> Any:
    try:
        return json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return function["arguments"]
