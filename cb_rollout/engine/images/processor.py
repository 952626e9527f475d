"""Turn prompts with images into token ids, and into the tensors that a model's forward takes.

Owns the pictures' check and the call of the processor, once for each prompt. Runs on the caller's
thread, so a picture that cannot be read is refused before anything is queued.
"""

import io
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from jinja2 import TemplateError

from cb_rollout.compat import multimodal
from cb_rollout.config.checks import plain_token_ids
from cb_rollout.engine.images.prompt_images import PromptImages, create_prompt_images
from cb_rollout.errors import ConfigurationError, InvalidRequestError, error_text

# Chat templates raise these, deliberately or not; tokenizers raise some for lone surrogates.
ENCODING_FAULTS = (TemplateError, ValueError, TypeError, KeyError, AttributeError)

# Processors raise these too, for pictures that they do not take, and PIL, for broken files.
IMAGE_FAULTS = (
    *ENCODING_FAULTS,
    ArithmeticError,
    EOFError,
    ImportError,
    IndexError,
    OSError,
    RuntimeError,
    SyntaxError,
    struct.error,
)

# Types of a chat's parts; others are the chat template's own.
IMAGE_PARTS = ("image", "image_url")
REFUSED_PARTS = ("video", "video_url", "audio", "audio_url", "input_audio")

# Keys of a chat's image part that name its picture, as transformers' processors read them.
PICTURE_KEYS = ("image", "path", "url")


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with images, encoded by a processor."""

    token_ids: list[int]
    """With a placeholder for each position that an image takes."""
    tensors: Mapping[str, torch.Tensor]
    """Arguments of the model's forward, by name."""
    per_token: frozenset[str]
    """Names of the tensors that hold a number for each token."""
    num_images: int
    placeholders: frozenset[int]
    """Token ids that stand for images, as the processor says."""
    made: dict[frozenset[int], PromptImages] = field(default_factory=dict, repr=False)
    """Results of `images` by its argument: a repeated prompt is hashed once."""

    def images(self, placeholders: frozenset[int]) -> PromptImages:
        """Return the images as an engine takes them, whose model has these `placeholders`."""
        if placeholders not in self.made:
            spans = _spans(self.token_ids, self.placeholders | placeholders, self.num_images)
            self.made[placeholders] = create_prompt_images(
                self.tensors, spans, self.num_images, self.per_token, self.token_ids
            )
        return self.made[placeholders]


def is_chat(prompt: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Return whether a prompt is a list of messages."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def has_image_parts(chat: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a chat's content holds images, or parts that are refused."""
    return any(part.get("type") in (*IMAGE_PARTS, *REFUSED_PARTS) for part in _parts(chat))


def image_parts(chat: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Return the parts of a chat that stand for images."""
    return filter(_is_image_part, _parts(chat))


def _is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def picture_of(part: Mapping[str, Any]) -> Any:
    """Return the picture that a chat's part names; None: none."""
    if part.get("type") == "image_url":
        named = part.get("image_url")
        return named.get("url") if isinstance(named, Mapping) else named
    for key in PICTURE_KEYS:
        if part.get(key) is not None:
            return part[key]
    return None


def encoded_row(
    row: Mapping[str, Any], processor: Any, index: int, *, add_generation_prompt: bool = True
) -> Any:
    """Return the prompt of `{"prompt": token ids, text or chat, "images": [...]}`, or refuse it.

    `add_generation_prompt`: end a chat with the tokens that begin an answer.
    """
    if "input_ids" in row and "images" not in row:
        raise InvalidRequestError(
            f"input {index} is a tokenizer's {type(row).__name__} of {', '.join(map(str, row))}; "
            "pass its ['input_ids'], without padding."
        )
    unknown = {str(key) for key in row} - {"prompt", "images"}
    if unknown or "prompt" not in row:
        raise InvalidRequestError(
            f"input {index} is a dict of {', '.join(map(str, row))}; pass {{'prompt': ids or text, "
            f"'images': [...]}}; videos and sounds are not supported. Pass one chat as [[message, "
            "...]]."
        )
    prompt = row["prompt"]
    images = row.get("images")
    is_list = isinstance(images, Sequence) and not isinstance(images, str | bytes | Mapping)
    if images is None or (isinstance(images, Sequence) and not images):
        return prompt
    if not is_list:
        raise InvalidRequestError(
            f"input {index}: images is a {type(images).__name__}; pass a list, [image]."
        )
    if is_chat(prompt):
        return encoded_chat(
            _with_pictures(prompt, images, index),
            processor,
            index,
            add_generation_prompt=add_generation_prompt,
        )
    _require_processor(processor, index)
    pictures = _loaded(images, index)
    if isinstance(prompt, str):
        tensors = _of_text(prompt, pictures, processor, index)
        return _prompt_of(tensors, pictures, processor)
    return _of_token_ids(prompt, pictures, processor, index)


def encoded_chat(
    chat: Sequence[Mapping[str, Any]],
    processor: Any,
    index: int,
    tools: Any = None,
    *,
    add_generation_prompt: bool = True,
) -> ImagePrompt:
    """Return a chat with `{"type": "image", "image": ...}` parts as the processor encodes it.

    Args:
        chat: the messages.
        processor: the model's.
        index: index of the chat among the inputs, for errors.
        tools: as the chat template takes them.
        add_generation_prompt: end with the tokens that begin an answer.
    """
    _require_processor(processor, index)
    for part in _parts(chat):
        if part.get("type") in REFUSED_PARTS:
            raise InvalidRequestError(
                f"input {index} holds a part of type {part['type']!r}; only text and images are "
                "supported."
            )
    named = [picture_of(part) for part in image_parts(chat)]
    if any(picture is None for picture in named):
        raise InvalidRequestError(
            f"input {index} has an image part without an image; add 'image': IMAGE to it."
        )
    pictures = _loaded(named, index)

    def call(given: list[Any]) -> Any:
        return processor.apply_chat_template(
            _with_pictures(chat, given, index),
            tools=tools,
            tokenize=True,
            add_generation_prompt=add_generation_prompt,
            return_dict=True,
            return_tensors="pt",
        )

    tensors = _processed(call, pictures, index)
    return _prompt_of(tensors, pictures, processor)


def _require_processor(processor: Any, index: int) -> None:
    if not multimodal.is_processor(processor):
        raise InvalidRequestError(
            f"input {index} has images, which need the model's processor; pass "
            "tokenizer=AutoProcessor.from_pretrained(name)."
        )


def _parts(chat: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in chat:
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            for part in content:
                if isinstance(part, Mapping):
                    yield part


def _with_pictures(
    chat: Sequence[Mapping[str, Any]], pictures: Sequence[Any], index: int
) -> list[dict[str, Any]]:
    """Return a chat with these pictures, in order, in its image parts."""
    num_parts = len(list(image_parts(chat)))
    if num_parts != len(pictures):
        raise InvalidRequestError(
            f"input {index} has {num_parts} image parts but {len(pictures)} images; pass one image "
            "per part."
        )
    remaining = iter(pictures)
    messages = [dict(message) for message in chat]
    for message in messages:
        content = message.get("content")
        if not isinstance(content, Sequence) or isinstance(content, str):
            continue
        parts = []
        for part in content:
            if _is_image_part(part):
                parts.append({"type": "image", "image": next(remaining)})
            else:
                parts.append(part)
        message["content"] = parts
    return messages


def _loaded(images: Sequence[Any], index: int) -> list[Any]:
    from PIL import Image
    from transformers import image_utils

    pictures = []
    for number, image in enumerate(images):
        where = f"input {index}: image {number}"
        if isinstance(image, str) and image.startswith(("http://", "https://")):
            raise InvalidRequestError(f"{where} is a URL; download it, and pass the image itself.")
        try:
            picture: Any = image
            if isinstance(image, str | os.PathLike):
                picture = _opened(image)
            # PIL 12 cannot rewind a loaded picture that has one frame.
            if getattr(picture, "is_animated", False):
                picture.seek(0)
            if hasattr(picture, "load"):
                picture.load()
            is_picture = bool(image_utils.is_valid_image(picture))
        except (*IMAGE_FAULTS, Image.DecompressionBombError) as error:
            raise InvalidRequestError(f"{where} cannot be read ({error_text(error)}).") from error
        if not is_picture:
            raise InvalidRequestError(
                f"{where} is a {type(image).__name__}; pass a PIL image, a path or an array."
            )
        pictures.append(picture)
    return pictures


def _opened(path: str | os.PathLike[str]) -> Any:
    """Return the first frame of a file or of a data URL, as transformers' processors open it."""
    from PIL import Image
    from transformers.image_utils import load_image

    if isinstance(path, str) and path.startswith("data:"):
        return load_image(path)
    return load_image(Image.open(io.BytesIO(Path(path).read_bytes())))


def _processed(
    call: Callable[[list[Any]], Any], pictures: list[Any], index: int
) -> dict[str, torch.Tensor]:
    """Return the processor's tensors of pictures; convert them to RGB if it refuses."""
    try:
        return dict(call(pictures))
    except IMAGE_FAULTS as error:
        if not all(_is_rgb(picture) for picture in pictures):
            return _processed(call, [_as_rgb(picture) for picture in pictures], index)
        raise InvalidRequestError(
            f"input {index}: the processor rejects the prompt with its {len(pictures)} images "
            f"({error_text(error)})."
        ) from error


def _is_rgb(picture: Any) -> bool:
    """Return whether a picture has RGB colours, as arrays are taken to have."""
    return getattr(picture, "mode", "RGB") == "RGB"


def _as_rgb(picture: Any) -> Any:
    return picture if _is_rgb(picture) else picture.convert("RGB")


def _of_text(text: str, pictures: list[Any], processor: Any, index: int) -> dict[str, torch.Tensor]:
    """Return what a processor makes of a text and its pictures; `index`: of the input."""
    # Not every processor refuses a wrong number of markers (LLaVA's in transformers 5.17).
    marker = getattr(processor, "image_token", None)
    num_markers = text.count(marker) if isinstance(marker, str) else 0
    if num_markers not in (0, len(pictures)):
        raise InvalidRequestError(
            f"input {index} holds {marker} {num_markers} times but has {len(pictures)} images; "
            "pass one image per placeholder."
        )

    def call(given: list[Any]) -> Any:
        try:
            return processor(text=[text], images=[given], return_tensors="pt")
        except IMAGE_FAULTS:
            # Some read a nested list as the pages of one document, and a flat one as pictures.
            return processor(text=[text], images=given, return_tensors="pt")

    return _processed(call, pictures, index)


def _prompt_of(
    tensors: dict[str, torch.Tensor], pictures: Sequence[Any], processor: Any
) -> ImagePrompt:
    """Return the prompt in a processor's tensors, and remove its token ids from them."""
    token_ids = [int(token_id) for token_id in tensors.pop("input_ids")[0]]
    tensors.pop("attention_mask", None)
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    return ImagePrompt(
        token_ids=token_ids,
        tensors=tensors,
        per_token=_per_token(tensors, processor, len(token_ids)),
        num_images=len(pictures),
        placeholders=multimodal.image_token_ids(processor),
    )


def _per_token(
    tensors: Mapping[str, torch.Tensor], processor: Any, num_tokens: int
) -> frozenset[str]:
    """Return names of tensors per token; an image's tensor may happen to have as many columns."""
    of_images = multimodal.image_input_names(processor)
    names = set()
    for name, tensor in tensors.items():
        has_column_per_token = tensor.shape[:2] == (1, num_tokens)
        if has_column_per_token and name not in of_images and not tensor.is_floating_point():
            names.add(name)
    return frozenset(names)


def _of_token_ids(prompt: Any, pictures: list[Any], processor: Any, index: int) -> ImagePrompt:
    """Return expanded token ids with their pictures, or refuse a wrong number of image tokens.

    A prompt of markers alone shows how many image tokens the pictures need.
    """
    try:
        token_ids = plain_token_ids(prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"input {index}: the prompt is neither token ids nor text ({error_text(error)})."
        ) from error
    tensors = _of_markers(pictures, processor, index)
    expanded = tensors["input_ids"][0].tolist()
    num_wanted = _num_image_tokens(expanded, processor)
    num_given = _num_image_tokens(token_ids, processor)
    if num_wanted != num_given:
        raise InvalidRequestError(
            f"input {index} holds {num_given} image tokens, but its {len(pictures)} images need "
            f"{num_wanted}; pass the ids that the processor returns for the prompt and its images, "
            "or pass text."
        )
    for name in _per_token(tensors, processor, len(expanded)) - {"input_ids", "attention_mask"}:
        if not name.endswith("token_type_ids"):
            raise ConfigurationError(
                f"{type(processor).__name__} makes {name} of a text only; pass text or a chat, not "
                "token ids."
            )
        tensors[name] = torch.tensor(processor.create_mm_token_type_ids([token_ids]))
    tensors["input_ids"] = torch.tensor([token_ids])
    return _prompt_of(tensors, pictures, processor)


def _num_image_tokens(token_ids: Sequence[int], processor: Any) -> int:
    image_token_ids = multimodal.image_token_ids(processor)
    return len([token_id for token_id in token_ids if token_id in image_token_ids])


def _of_markers(pictures: list[Any], processor: Any, index: int) -> dict[str, torch.Tensor]:
    markers = multimodal.image_markers(processor)
    if not markers:
        raise ConfigurationError(
            f"{type(processor).__name__} has no image_token, so token ids cannot be matched to "
            "images; pass text or a chat."
        )
    known = multimodal.image_token_ids(processor)
    failure = f"input {index}: {type(processor).__name__} makes no tokens of an image token alone."
    for marker in markers:
        try:
            tensors = _of_text(" ".join([marker] * len(pictures)), pictures, processor, index)
        except InvalidRequestError as error:
            failure = str(error)
            continue
        if not known.isdisjoint(tensors["input_ids"][0].tolist()):
            return tensors
    raise InvalidRequestError(f"{failure} Pass text or a chat, not token ids.")


def _spans(token_ids: Sequence[int], known: frozenset[int], num_images: int) -> list[range]:
    """Return each run of placeholders, if there are as many as images, else one span of all.

    The two numbers differ if a token separates the tiles of one image, or if two images adjoin.
    Without placeholders the span is the whole prompt.
    """
    spans: list[range] = []
    for index, token_id in enumerate(token_ids):
        if token_id not in known:
            continue
        if spans and spans[-1].stop == index:
            spans[-1] = range(spans[-1].start, index + 1)
        else:
            spans.append(range(index, index + 1))
    if not spans:
        return [range(len(token_ids))]
    if len(spans) == num_images:
        return spans
    return [range(spans[0].start, spans[-1].stop)]
