"""Encode prompts and chats as token ids; a conversation's next turn reuses its earlier tokens.

A chat that comes back as text may be tokenized into other tokens than were sampled. So the encoder
stores the tokens of each answered text chat under its rendered text: a chat that begins with that
text begins with the same tokens, and finds their keys in the prefix cache.

Pictures are read from data URLs in one of `FORMATS`, within the server's limits. Nothing is
fetched, so no client can make the server read a file or contact another machine. Called on one
thread at a time.
"""

import base64
import io
import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cb_rollout.compat.multimodal import is_processor, text_tokenizer
from cb_rollout.engine.images.processor import (
    ENCODING_FAULTS,
    IMAGE_FAULTS,
    ImagePrompt,
    encoded_chat,
    has_image_parts,
)
from cb_rollout.errors import InvalidRequestError, error_text
from cb_rollout.server.options import ServerOptions
from cb_rollout.server.protocol import ApiError

# Limits over all conversations: about 10 MB, and a millisecond to search. The least recently used
# conversations are dropped first.
MAX_KNOWN_TOKENS = 1 << 20
MAX_KNOWN = 1 << 12

# Beginnings of data URLs, and PIL's names of their formats.
FORMATS = {f"data:image/{form.lower()}": form for form in ("PNG", "JPEG", "WEBP", "GIF")}

DATA_URL = re.compile(rf"({'|'.join(FORMATS)})(;[^,]{{0,100}})?;base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A chat, up to where the assistant answers."""

    text: str
    """Rendered by the template."""
    prompt: list[int] | ImagePrompt
    """The prompt of its request: token ids, with images if there are any."""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt.token_ids if isinstance(self.prompt, ImagePrompt) else self.prompt


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The tokens of an answered chat."""

    token_ids: "array[int]"
    """All tokens except the one that ended the answer."""
    end_text: str
    """Text of the token that ended the answer; only some templates write it."""
    end_ids: tuple[int, ...]


class PromptEncoder:
    """Encode prompts with the model's tokenizer, or with its processor for pictures."""

    def __init__(self, tokenizer: Any, options: ServerOptions) -> None:
        self._templates = tokenizer
        self._options = options
        self._takes_images = is_processor(tokenizer)
        self._tokenizer = text_tokenizer(tokenizer)
        self._known: OrderedDict[str, _Conversation] = OrderedDict()
        self._num_known_tokens = 0

    @property
    def abilities(self) -> list[str]:
        """Return the model's abilities, as Xinference names them."""
        template = str(getattr(self._templates, "chat_template", None) or "")
        found = ["generate"]
        if template:
            found.append("chat")
        if "tools" in template:
            found.append("tools")
        if self._takes_images:
            found.append("vision")
        return found

    def encode_text(self, text: str) -> list[int]:
        """Return a text prompt's token ids, with the tokenizer's special tokens."""
        return self._tokenizer(text)["input_ids"]

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> EncodedChat:
        """Apply the model's chat template, with the generation prompt at the end.

        Raises `ApiError` for a refused picture, and `InvalidRequestError` for a refused chat.
        """
        template = getattr(self._templates, "chat_template", None)
        if template is None:
            raise InvalidRequestError("the model has no chat template; use /v1/completions.")
        if tools and "tools" not in str(template):
            raise InvalidRequestError("the model's chat template takes no tools; leave them out.")
        pictures: list[Any] = []
        if has_image_parts(messages):
            self._require_readable(messages)
            messages, pictures = _with_pictures(messages, self._options)
        # A template that mentions no images may write content as it is, which must then be text.
        in_parts = self._takes_images and "image" in str(template)
        chat = [_for_template(message, in_parts) for message in messages]
        try:
            text = self._templates.apply_chat_template(
                chat, tools=tools or None, add_generation_prompt=True, tokenize=False
            )
        except ENCODING_FAULTS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses the messages ({error_text(error)})."
            ) from error
        if pictures:
            return EncodedChat(text, encoded_chat(chat, self._templates, 0, tools or None))
        return EncodedChat(text, self._continued(text))

    def _require_readable(self, messages: Sequence[dict[str, Any]]) -> None:
        """Refuse pictures if there is no processor, and text that stands for a picture."""
        if not self._takes_images:
            raise InvalidRequestError(
                "the model reads no pictures, or is served without its processor; send text."
            )
        marker = getattr(self._templates, "image_token", None)
        if marker and marker in str(messages):
            raise InvalidRequestError(
                f"a message holds the text {marker!r}, which stands for a picture; leave it out."
            )

    def remember(self, chat: EncodedChat, tokens: Sequence[int]) -> None:
        """Store an answered text chat, so that the next turn can begin with its tokens."""
        if isinstance(chat.prompt, ImagePrompt):
            return
        body = list(tokens[:-1])
        end = tuple(tokens[-1:])
        body_text = self._decode(body)
        whole_text = self._decode(tokens)
        if not whole_text.startswith(body_text):
            # The last two tokens share a character.
            body = list(tokens)
            end = ()
            body_text = whole_text
        key = chat.text + body_text
        token_ids = array("i", chat.token_ids + body)
        self._forget(key)
        end_text = whole_text[len(body_text) :]
        self._known[key] = _Conversation(token_ids, end_text=end_text, end_ids=end)
        self._num_known_tokens += len(token_ids)
        while self._num_known_tokens > MAX_KNOWN_TOKENS or len(self._known) > MAX_KNOWN:
            self._forget(next(iter(self._known)))

    def _forget(self, key: str) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._num_known_tokens -= len(known.token_ids)

    def _continued(self, text: str) -> list[int]:
        """Return a rendered chat's token ids, beginning with the longest answered chat's."""
        plain = self._encode_part(text)
        key = max(filter(text.startswith, self._known), key=len, default=None)
        if key is None:
            return plain
        self._known.move_to_end(key)
        known = self._known[key]
        num_characters = len(key)
        token_ids = list(known.token_ids)
        if known.end_text and text.startswith(known.end_text, num_characters):
            token_ids += known.end_ids
            num_characters += len(known.end_text)
        token_ids += self._encode_part(text[num_characters:])
        # Some tokenizers normalise a split text differently; then only the whole text is right.
        if self._decode(token_ids) != self._decode(plain):
            return plain
        return token_ids

    def _encode_part(self, text: str) -> list[int]:
        if not text:
            return []
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _with_pictures(
    messages: Sequence[dict[str, Any]], options: ServerOptions
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages with PIL images for data URLs, and the images; or raise `ApiError`."""
    pictures: list[Any] = []
    read_messages = []

    def read(part: dict[str, Any], param: str) -> dict[str, Any]:
        if part["type"] != "image_url":
            return part
        try:
            most = options.max_images
            if len(pictures) == most:
                raise ValueError(f"one picture more than the {most} of a request that are allowed")
            pictures.append(_picture(part["image_url"]["url"], options))
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}.", param) from error
        return {"type": "image", "image": pictures[-1]}

    for at, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for number, part in enumerate(content):
                parts.append(read(part, f"messages.{at}.content.{number}.image_url"))
            message = {**message, "content": parts}
        read_messages.append(message)
    return read_messages, pictures


def _picture(url: str, options: ServerOptions) -> Any:
    """Return a data URL's first frame, upright and in RGB; `ValueError` if missing or too large."""
    from PIL import Image
    from transformers.image_utils import load_image

    heading = DATA_URL.match(url)
    if heading is None:
        raise ValueError(
            f"a picture is a URL of {', '.join(FORMATS)} in base64; others are not fetched"
        )
    # Four characters are three bytes.
    num_bytes = (len(url) - heading.end()) * 3 // 4
    most = options.max_image_bytes
    if num_bytes > most:
        size = f"about {num_bytes:,} bytes, and {most:,} are allowed"
        raise ValueError(f"the picture has {size}; send a smaller one")
    try:
        data = base64.b64decode(url[heading.end() :], validate=True)
    except ValueError as error:
        raise ValueError(f"the data is not base64 ({error_text(error)})") from error
    try:
        picture = Image.open(io.BytesIO(data), formats=tuple(FORMATS.values()))
        width, height = picture.size
        # Asked before the pixels are decoded.
        is_small = width * height <= options.max_image_pixels
        image = load_image(picture) if is_small else None
    except (*IMAGE_FAULTS, Image.DecompressionBombError) as error:
        raise ValueError(f"the picture cannot be read ({error_text(error)})") from error
    if image is None:
        size = f"{width:,} x {height:,} pixels, and {options.max_image_pixels:,} are allowed"
        raise ValueError(f"the picture has {size}; send a smaller one")
    return image


def _for_template(message: dict[str, Any], in_parts: bool) -> dict[str, Any]:
    """Return a message as templates expect it, with call arguments as objects.

    With `in_parts`, text becomes an item of a list, as processors' templates expect; otherwise text
    parts are joined.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content", "")
    if in_parts and content == "":
        content = []
    elif in_parts and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif not in_parts and isinstance(content, list):
        content = "".join(part["text"] for part in content)
    plain["content"] = content
    calls = plain.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_with_arguments(call) for call in calls]
    return plain


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": _arguments(function)}}


def _arguments(function: dict[str, Any]) -> Any:
    try:
        return json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return function["arguments"]
