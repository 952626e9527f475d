"""Rows of a data set: their checks before anything is generated, and their prompts as token ids.

A row has a prompt or messages, a unique id, and no key that results use.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.rollout.prompts import encoded
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
    """Changes when any row changes, or their order."""
    first_chat: str | None
    """Label of the first row whose prompt is messages; None: none is."""
    first_text: str | None
    """Label of the first row whose prompt is text; None: none is."""


def survey(source: Source) -> Survey:
    """Read every row once and check it.

    Raises:
        InvalidRequestError: some rows cannot be used; the first few are named with their reasons.
    """
    digest = hashlib.sha256()
    seen: dict[RowId, str] = {}
    problems: list[str] = []
    num_rows = num_problems = 0
    first: dict[type, str] = {}
    for number, raw in enumerate(source()):
        num_rows += 1
        row = None
        problem = raw.problem or problem_of(raw.value)
        if problem is None:
            row = _row(number, raw)
            if row.id in seen:
                problem = f"has the id {row.id!r} of {seen[row.id]}"
            seen.setdefault(row.id, raw.label)
        if row is not None:
            digest.update(json.dumps([row.id, row.values]).encode())
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
    return Survey(num_rows, digest.hexdigest(), first.get(Mapping), first.get(str))


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
        if value is not None or name not in ("id", "prompt", "messages")
    }
    return Row(raw.label, values.pop("id", number), values)


class RowEncoder:
    """Encoding of rows: system message, chat template, tokenizer."""

    def __init__(self, tokenizer: Any, *, system_prompt: str | None, chat: bool) -> None:
        """Create an encoder.

        Args:
            tokenizer: a transformers tokenizer.
            system_prompt: system message before each chat; None: none.
            chat: make each prompt that is text a chat of one user message.
        """
        self._tokenizer, self._system_prompt, self._chat = tokenizer, system_prompt, chat

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

    def token_ids(self, row: Row) -> Sequence[int]:
        """Return the token ids of a row's prompt.

        Raises:
            InvalidRequestError: the chat template refuses the messages.
        """
        prompt: Any = row.prompt
        if self._chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if self._system_prompt is not None and (row.is_chat or self._chat):
            if prompt[0]["role"] == "system":
                raise InvalidRequestError(
                    "the chat has a system message of its own; take it out, or leave "
                    "system_prompt out."
                )
            prompt = [{"role": "system", "content": self._system_prompt}, *prompt]
        (token_ids,) = encoded([prompt], self._tokenizer)
        assert isinstance(token_ids, Sequence), "a tokenizer took images"
        return token_ids
