"""Rows of a data set: their checks before anything is generated, and their prompts as token ids.

A row has a prompt or messages, a unique id, and no key that results use. Its pictures are paths,
relative to the folder of the input, or data URLs.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cb_rollout.compat.multimodal import is_processor
from cb_rollout.engine.images.processor import is_chat
from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.rollout.prompts import Encoded, encoded
from cb_rollout.tools.dataset.images import (
    image_digests,
    image_names,
    located,
    located_in_chat,
    problem_of_images,
)
from cb_rollout.tools.dataset.source import RawRow, Source

# Keys that a result adds to its row.
RESULT_KEYS = (
    "sample", "completion", "token_ids", "finish_reason", "logprobs", "error", "scores",
)  # fmt: skip

# Enough to see a pattern, few enough for an error message.
PROBLEMS_SHOWN = 5

RowId = int | str


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row of the input."""

    label: str
    """File and line, or data set and row, for messages."""
    id: RowId
    """The row's own id, or its number from 0."""
    values: dict[str, Any]
    """The row as it was read."""

    @property
    def prompt(self) -> str | list[Any]:
        """Return text, messages, or token ids."""
        return self.values["prompt"] if "prompt" in self.values else self.values["messages"]

    @property
    def is_chat(self) -> bool:
        """Tell whether the prompt is messages."""
        return not isinstance(self.prompt, str) and isinstance(self.prompt[0], Mapping)


@dataclass(frozen=True, slots=True)
class Survey:
    """Result of one pass over the input."""

    num_rows: int
    digest: str
    """Changes when any row or picture changes, or their order."""
    first_chat: str | None
    """Label of the first row whose prompt is messages; None: none is."""
    first_text: str | None
    """Label of the first row whose prompt is text; None: none is."""
    first_image: str | None
    """Label of the first row with pictures; None: none has any."""


def survey(source: Source, folder: Path = Path()) -> Survey:
    """Read every row once and check it.

    Args:
        source: the rows.
        folder: that paths of pictures are relative to.

    Raises:
        InvalidRequestError: some rows cannot be used; the first few are named with their reasons.
    """
    digest = hashlib.sha256()
    known_pictures: dict[str, str] = {}
    seen: dict[RowId, str] = {}
    problems: list[str] = []
    num_rows = num_problems = 0
    first: dict[type, str] = {}
    first_image = None
    for number, raw in enumerate(source()):
        num_rows += 1
        row = None
        problem = raw.problem or problem_of(raw.value) or problem_of_images(raw.value, folder)
        if problem is None:
            row = _row(number, raw)
            if row.id in seen:
                problem = f"has the id {row.id!r} of {seen[row.id]}"
            seen.setdefault(row.id, raw.label)
        if row is not None:
            pictures = image_digests(row.values, folder, known_pictures)
            digest.update(json.dumps([row.id, row.values, *pictures]).encode())
            first_image = first_image or (raw.label if any(image_names(row.values)) else None)
            kind = Mapping if row.is_chat else type(row.prompt)
            first.setdefault(kind, raw.label)
        if problem is not None:
            num_problems += 1
            if len(problems) < PROBLEMS_SHOWN:
                problems.append(f"{raw.label} {problem}")
    if problems:
        rest = num_problems - len(problems)
        raise InvalidRequestError(
            f"{num_problems} of {num_rows} rows cannot be used: {'; '.join(problems)}"
            f"{f'; and {rest} more' if rest else ''}. Nothing was generated."
        )
    if not num_rows:
        raise InvalidRequestError("the input has no rows.")
    return Survey(num_rows, digest.hexdigest(), first.get(Mapping), first.get(str), first_image)


def rows(source: Source) -> Iterator[Row]:
    """Yield the rows of an input that `survey` has passed."""
    return (_row(number, raw) for number, raw in enumerate(source()))


def problem_of(value: Any) -> str | None:
    """Return the reason why a row cannot be used, without a model; None: it can."""
    if not isinstance(value, Mapping):
        return f"is not an object but a {type(value).__name__}"
    given = [name for name in ("prompt", "messages") if value.get(name) is not None]
    if len(given) != 1:
        return "has both prompt and messages" if given else "has neither prompt nor messages"
    if clash := [key for key in RESULT_KEYS if key in value]:
        return f"has the key {clash[0]!r}, which results use; rename it"
    if not isinstance(value.get("id"), int | str | None) or isinstance(value.get("id"), bool):
        return f"has the id {value['id']!r}, which is neither text nor a whole number"
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"holds what JSON cannot ({error}); take it out"
    return _problem_of_prompt(given[0], value[given[0]])


def _problem_of_prompt(name: str, prompt: Any) -> str | None:
    if isinstance(prompt, str) and name == "prompt":
        return None if prompt else "has an empty prompt"
    if not isinstance(prompt, list):
        return f"has {name} that are not a list" if name == "messages" else f"has no text as {name}"
    if not prompt:
        return f"has an empty list as {name}"
    if name == "prompt" and all(type(token) is int for token in prompt):
        return None
    for message in prompt:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            return f"has {name} in which {message!r:.80} is not a message with role and content"
    return None


def _row(number: int, raw: RawRow) -> Row:
    # Columnar files have every key in every row.
    values: dict[str, Any] = {
        name: value
        for name, value in raw.value.items()
        if value is not None or name not in ("id", "prompt", "messages", "images")
    }
    return Row(raw.label, values.pop("id", number), values)


class RowEncoder:
    """Encoding of rows: system message, chat template, tokenizer or processor."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None,
        chat: bool,
        folder: Path = Path(),
    ) -> None:
        """Create an encoder.

        Args:
            tokenizer: a transformers tokenizer, or for pictures a processor.
            system_prompt: system message before each chat; None: none.
            chat: make each prompt that is text a chat of one user message.
            folder: that paths of pictures are relative to.
        """
        self._tokenizer, self._system_prompt, self._chat = tokenizer, system_prompt, chat
        self._folder = folder

    def check(self, survey: Survey) -> None:
        """Raise `ConfigurationError` where prompts do not fit the tokenizer or the options."""
        if self._system_prompt is not None and survey.first_text and not self._chat:
            raise ConfigurationError(
                f"{survey.first_text} is text, which cannot follow a system prompt; set chat to "
                "make each text a chat, or leave system_prompt out."
            )
        first_chat = survey.first_chat or (survey.first_text if self._chat else None)
        if first_chat and getattr(self._tokenizer, "chat_template", None) is None:
            raise ConfigurationError(
                f"{first_chat} is a chat, and the tokenizer has no chat template; give text as "
                "prompt, or a model with a template."
            )
        if survey.first_image and not is_processor(self._tokenizer):
            raise ConfigurationError(
                f"{survey.first_image} has images, which take the processor of a model that reads "
                "them; cb-rollout doctor MODEL says whether this one does."
            )

    def encoded(self, row: Row) -> Encoded:
        """Return a row's prompt as an engine takes it.

        Raises:
            InvalidRequestError: the chat template refuses the messages, or the processor a picture.
        """
        prompt: Any = row.prompt
        images = [located(name, self._folder) for name in row.values.get("images", ())]
        if self._chat and isinstance(prompt, str):
            text = {"type": "text", "text": prompt}
            content = [*({"type": "image"} for _ in images), text] if images else prompt
            prompt = [{"role": "user", "content": content}]
        if self._system_prompt is not None and (row.is_chat or self._chat):
            if prompt[0]["role"] == "system":
                raise InvalidRequestError(
                    "the chat has a system message of its own; take it out, or leave "
                    "system_prompt out."
                )
            system: dict[str, Any] = {"role": "system", "content": self._system_prompt}
            if any(isinstance(message["content"], list) for message in prompt):
                # Templates of processors read either texts or parts in every message.
                system["content"] = [{"type": "text", "text": self._system_prompt}]
            prompt = [system, *prompt]
        if is_chat(prompt):
            prompt = located_in_chat(prompt, self._folder)
        whole = {"prompt": prompt, "images": images} if images else prompt
        try:
            (found,) = encoded([whole], self._tokenizer)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error).removeprefix("input 0: ")) from error
        return found
