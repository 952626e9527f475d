"""Prompts and chats to token ids; a conversation's next turn begins with the last turn's tokens.

A client sends a chat back as text, and its tokenization may differ from the sampled tokens. So the
encoder remembers each answered chat by its text: a new chat whose rendered text begins with that
text begins with the same tokens. The prefix cache then holds their keys, and the turns of a
trajectory are one sequence. Called on one thread at a time.
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cb_rollout.errors import InvalidRequestError, error_text
from cb_rollout.rollout.prompts import ENCODING_FAULTS

# Limits over all conversations, about 10 MB and a millisecond to search. The least recently used
# are dropped first.
MAX_KNOWN_TOKENS, MAX_KNOWN = 1 << 20, 1 << 12


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The tokens of an answered chat."""

    token_ids: "array[int]"
    """All tokens but the one that ended the answer."""
    end_text: str
    """Text of the token that ended the answer; only some templates write it."""
    end_ids: tuple[int, ...]


class PromptEncoder:
    """Encode the prompts of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, _Conversation] = OrderedDict()
        self._num_known_tokens = 0

    def encode_text(self, text: str) -> list[int]:
        """Return a text prompt's token ids, with the tokenizer's special tokens."""
        return self._tokenizer(text)["input_ids"]

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[int]]:
        """Apply the model's chat template, up to where the assistant answers.

        Returns:
            The rendered text, and its token ids.

        Raises:
            InvalidRequestError: there is no template, or it refuses the chat.
        """
        template = getattr(self._tokenizer, "chat_template", None)
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template; send text to /v1/completions."
            )
        if tools and "tools" not in str(template):
            raise InvalidRequestError("the model's chat template takes no tools; leave them out.")
        try:
            text = self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=tools or None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except ENCODING_FAULTS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses the messages ({error_text(error)})."
            ) from error
        return text, self._continued(text)

    def remember(self, prompt_text: str, prompt_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep an answered chat, for the next turn to begin with its tokens."""
        body, end = tuple(tokens[:-1]), tuple(tokens[-1:])
        body_text, whole_text = self._decode(body), self._decode(tokens)
        if not whole_text.startswith(body_text):
            # The last two tokens share a character.
            body, end, body_text = tuple(tokens), (), whole_text
        text = prompt_text + body_text
        known = _Conversation(array("i", [*prompt_ids, *body]), whole_text[len(body_text) :], end)
        self._forget(text)
        self._known[text] = known
        self._num_known_tokens += len(known.token_ids)
        while self._num_known_tokens > MAX_KNOWN_TOKENS or len(self._known) > MAX_KNOWN:
            self._forget(next(iter(self._known)))

    def _forget(self, text: str) -> None:
        if (known := self._known.pop(text, None)) is not None:
            self._num_known_tokens -= len(known.token_ids)

    def _continued(self, text: str) -> list[int]:
        """Return a rendered chat's token ids, beginning with the longest known conversation's."""
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
        # Some tokenizers normalise a text differently in two parts; then only the whole is right.
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
    """Return a message as templates expect it: joined text parts, call arguments as objects."""
    plain = {name: value for name, value in message.items() if value is not None}
    if isinstance(content := plain.get("content"), list):
        plain["content"] = "".join(part["text"] for part in content)
    plain.setdefault("content", "")
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in calls
        ]
    return plain


def _arguments(function: dict[str, Any]) -> Any:
    try:
        return json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return function["arguments"]
