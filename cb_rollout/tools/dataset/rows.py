"""What a row must hold: a prompt or messages, an id of its own, and no key that results use.

Owns the checks that are made of every row before anything is generated.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cb_rollout.errors import InvalidRequestError
from cb_rollout.tools.dataset.source import RawRow, Source

RESULT_KEYS = (
    "sample", "completion", "token_ids", "finish_reason", "logprobs", "error", "scores",
)  # fmt: skip
# What a result row adds to its input row.

PROBLEMS_SHOWN = 5
# Enough to see the pattern of what is wrong, and few enough for a line of a terminal.

RowId = int | str


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row of the input."""

    label: str
    """Where it was read, for people."""
    id: RowId
    """Its own id, or its number from 0 where it has none."""
    values: dict[str, Any]
    """The row as it was read."""

    @property
    def prompt(self) -> str | list[Any]:
        """Text, messages, or token ids."""
        return self.values["prompt"] if "prompt" in self.values else self.values["messages"]

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is messages."""
        return not isinstance(self.prompt, str) and isinstance(self.prompt[0], Mapping)


@dataclass(frozen=True, slots=True)
class Survey:
    """What one pass over the input found."""

    num_rows: int
    digest: str
    """Changes when any row changes, or their order."""
    first_chat: str | None
    """Where the first row that is messages was read; None: there is none."""
    first_text: str | None
    """The same for text."""


def survey(source: Source) -> Survey:
    """Read every row once and refuse what could not be generated.

    Raises:
        InvalidRequestError: some rows cannot be used; the first few are named with their reasons.
    """
    digest = hashlib.sha256()
    seen: dict[RowId, str] = {}
    problems: list[str] = []
    num_rows = num_problems = 0
    first: dict[type, str] = {}
    for number, raw in enumerate(source):
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
    """The rows of an input that `survey` has passed."""
    return (_row(number, raw) for number, raw in enumerate(source))


def problem_of(value: Any) -> str | None:
    """Why a row cannot be used, seen without a model; None: it can."""
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
    values = {name: value for name, value in raw.value.items() if not _is_void(name, value)}
    return Row(raw.label, values.pop("id", number), values)


def _is_void(name: str, value: Any) -> bool:
    """Columnar files have every key in every row."""
    return value is None and name in ("id", "prompt", "messages")
