"""Rows of a data set: their sources, their checks, and their prompts as an engine takes them.

A row has a prompt or messages, a unique id, and no key that results use; its pictures are data
URLs, or paths relative to the input's folder. Rows are read one by one, and twice: by `survey`,
then by `rows`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cb_rollout.engine.images.processor import image_parts, is_chat, picture_of
from cb_rollout.errors import ConfigurationError, InvalidRequestError, error_text
from cb_rollout.rollout.prompts import Encoded, encoded
from cb_rollout.tools.dataset.identity import digest_of_file
from cb_rollout.tools.dataset.options import DatasetOptions

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIX = ".parquet"

# Files of a directory that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` wrote.
SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")

# Rows decoded together: a few megabytes of long chats.
PARQUET_BATCH_ROWS = 256

# A picture's name that begins with one of these is a URL, not a path.
URLS = ("data:", "http:", "https:")

# In place of the digest of a picture that cannot be read; its row becomes an error.
UNREADABLE = "unreadable"

# Keys that a result adds to its row.
RESULT_KEYS = (
    "sample", "completion", "token_ids", "finish_reason", "logprobs", "error", "scores",
)  # fmt: skip

RowId = int | str

# Reads the rows from the start, always in the same order. Yields each row's label for messages,
# such as its file and line, and its value, or the error that reading it raised.
Source = Callable[[], Iterator[tuple[str, Any]]]


def create_source(name: str, *, split: str = "train", subset: str | None = None) -> Source:
    """Open a JSONL or Parquet file, or a split and subset of a data set in a directory or the hub.

    Raises `ConfigurationError` if it does not exist or cannot be read.
    """
    path = Path(name)
    try:
        is_file = path.is_file()
        if is_file:
            path.open("rb").close()
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be read ({error.strerror}).") from error
    suffixes = (*JSONL_SUFFIXES, PARQUET_SUFFIX)
    if is_file and path.suffix not in suffixes:
        why = f"ends in none of {', '.join(suffixes)}; convert it to one of them."
        raise ConfigurationError(f"{name} {why}")
    if path.suffix in suffixes and not is_file:
        state = "is not a file" if path.exists() else "does not exist"
        raise ConfigurationError(f"{name} {state}; pass a JSONL or Parquet file.")
    if path.suffix in JSONL_SUFFIXES:
        return partial(_jsonl_rows, path)
    if path.suffix == PARQUET_SUFFIX:
        return _parquet_source(path)
    return _dataset_source(name, split, subset)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                value = error
            yield f"{path} line {number}", value


def _parquet_source(path: Path) -> Source:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigurationError(f"{path} is not a Parquet file ({error}).") from error

    def rows() -> Iterator[tuple[str, Any]]:
        number = 0
        try:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for value in batch.to_pylist():
                    yield f"{path} row {number}", value
                    number += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigurationError(
                f"{path} cannot be read after row {number} ({error_text(error)}); it is damaged, "
                "or cut off: write it again."
            ) from error

    return rows


def _dataset_source(name: str, split: str, subset: str | None) -> Source:
    # Only this source needs the library, which takes seconds to import.
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        if any((Path(name) / marker).is_file() for marker in SAVED_DATASET_FILES):
            dataset = datasets.load_from_disk(name)
            if isinstance(dataset, datasets.DatasetDict):
                dataset = dataset[split]
        else:
            dataset = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        raise ConfigurationError(
            f"split {split!r} of {name!r} cannot be loaded ({error_text(error)}); pass a file, a "
            "data set's directory or name, and its split and subset."
        ) from error

    def rows() -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(dataset):
            yield f"{name} {split} row {number}", dict(row)

    return rows


@dataclass(frozen=True, slots=True)
class Row:
    """A checked row of the input."""

    label: str
    id: RowId
    """The row's own id, or its number from 0."""
    values: dict[str, Any]
    """The row as it was read."""


class Survey(NamedTuple):
    """Summary of an input, all rows together."""

    num_rows: int
    digest: str
    """Digest of the rows in their order; a row contains the names of its pictures."""
    pictures: dict[str, str]
    """Digest of each picture's file, by the name that rows give it; or `UNREADABLE`."""


def survey(source: Source, folder: Path = Path()) -> Survey:
    """Check every row; read every picture, whose path is relative to `folder`.

    Raises:
        InvalidRequestError: a row cannot be used; the message names the first one.
    """
    digest = hashlib.sha256()
    pictures: dict[str, str] = {}
    labels: dict[RowId, str] = {}
    for number, (label, value) in enumerate(source()):
        problem = _problem_of(value)
        if problem is not None:
            raise InvalidRequestError(f"{label} {problem}. Nothing was generated.")
        row = _row(number, label, value)
        if row.id in labels:
            other = labels[row.id]
            raise InvalidRequestError(f"{label} has the id {row.id!r} of {other}; rename one.")
        labels[row.id] = label
        digest.update(json.dumps([row.id, row.values]).encode())
        for name in _picture_names(row):
            # A data URL is part of the row, and other URLs are never fetched.
            if not name.startswith(URLS) and name not in pictures:
                pictures[name] = _digest_of_picture(folder / name)
    if not labels:
        raise InvalidRequestError("the input has no rows.")
    return Survey(len(labels), digest.hexdigest(), pictures)


def _digest_of_picture(path: Path) -> str:
    try:
        return digest_of_file(path)
    except (OSError, ValueError):
        return UNREADABLE


def rows(source: Source) -> Iterator[Row]:
    """Yield the rows of an input that `survey` has passed."""
    for number, (label, value) in enumerate(source()):
        yield _row(number, label, value)


def _row(number: int, label: str, value: Mapping[str, Any]) -> Row:
    values = dict(value)
    for name in ("id", "prompt", "messages", "images"):
        # Columnar files have every key in every row.
        if name in values and values[name] is None:
            del values[name]
    row_id = values.pop("id", number)
    return Row(label, row_id, values)


def _problem_of(value: Any) -> str | None:
    """Return why a row cannot be used, as far as can be told without a model; None if it can."""
    if isinstance(value, Exception):
        return f"is not JSON ({value})"
    if not isinstance(value, Mapping):
        return f"is not an object but a {type(value).__name__}"
    problem = _problem_of_keys(value)
    if problem is not None:
        return problem
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"holds what JSON cannot ({error}); take it out"
    if value.get("prompt") is not None:
        problem = _problem_of_prompt(value["prompt"])
    else:
        problem = _problem_of_messages("messages", value["messages"])
    if problem is not None:
        return problem
    return _problem_of_images(value)


def _problem_of_keys(value: Mapping[str, Any]) -> str | None:
    has_prompt = value.get("prompt") is not None
    has_messages = value.get("messages") is not None
    if has_prompt and has_messages:
        return "has both prompt and messages"
    if not has_prompt and not has_messages:
        return "has neither prompt nor messages"
    for key in RESULT_KEYS:
        if key in value:
            return f"has the key {key!r}, which results use; rename it"
    row_id = value.get("id")
    if not isinstance(row_id, int | str | None) or isinstance(row_id, bool):
        return f"has the id {row_id!r}, which is neither text nor a whole number"
    return None


def _problem_of_images(value: Mapping[str, Any]) -> str | None:
    if not isinstance(value.get("images"), list | None):
        return "has images that are not a list"
    for name in _image_names(value):
        if not isinstance(name, str):
            return f"has the image {name!r:.80}, which is not a path"
    return None


def _problem_of_prompt(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt else "has an empty prompt"
    if not isinstance(prompt, list):
        return "has no text as prompt"
    if prompt and all(type(token) is int for token in prompt):
        return None
    return _problem_of_messages("prompt", prompt)


def _problem_of_messages(key: str, messages: Any) -> str | None:
    if not isinstance(messages, list):
        return f"has {key} that are not a list"
    if not messages:
        return f"has an empty list as {key}"
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            return f"has {key} in which {message!r:.80} is not a message with role and content"
    return None


def _picture_names(row: Row) -> list[str]:
    """Return the names of a row's pictures: its `images`, or else the pictures of its chat."""
    return list(row.values.get("images") or _image_names(row.values))


def _image_names(row: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the names of a row's pictures: those in `images`, then those in its chat's parts."""
    yield from row.get("images") or ()
    for chat in (row.get("prompt"), row.get("messages")):
        if not is_chat(chat):
            continue
        for part in image_parts(chat):
            name = picture_of(part)
            if name is not None:
                yield name


def encoded_prompt(tokenizer: Any, options: DatasetOptions, folder: Path, row: Row) -> Encoded:
    """Return a row's prompt as an engine takes it; paths of pictures are relative to `folder`.

    Raises `InvalidRequestError` if the prompt does not fit the tokenizer or the options, or if a
    picture is missing.
    """
    prompt: Any = row.values["prompt"] if "prompt" in row.values else row.values["messages"]
    images: list[str] = []
    for name in _picture_names(row):
        images.append(name if name.startswith(URLS) else str(folder / name))
    if options.chat and isinstance(prompt, str):
        prompt = _chat_of_text(prompt, len(images))
    if options.system_prompt is not None:
        prompt = _with_system_prompt(options.system_prompt, prompt)
    engine_input = {"prompt": prompt, "images": images} if images else prompt
    try:
        (encoded_input,) = encoded([engine_input], tokenizer)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error).removeprefix("input 0: ")) from error
    return encoded_input


def _chat_of_text(text: str, num_images: int) -> list[dict[str, Any]]:
    """Return a chat of one user message, its pictures before its text."""
    if num_images == 0:
        return [{"role": "user", "content": text}]
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(num_images)]
    content.append({"type": "text", "text": text})
    return [{"role": "user", "content": content}]


def _with_system_prompt(system_prompt: str, prompt: Any) -> Any:
    """Put a system message before a chat; token ids stay as they are."""
    if isinstance(prompt, str):
        raise InvalidRequestError(
            "the prompt is text, which cannot follow a system prompt; set chat to make each text a "
            "chat, or leave system_prompt out."
        )
    if not is_chat(prompt):
        return prompt
    if prompt[0]["role"] == "system":
        raise InvalidRequestError(
            "the chat has a system message of its own; take it out, or leave system_prompt out."
        )
    content: Any = system_prompt
    # In a processor's template, either all messages are texts, or all messages have parts.
    if any(isinstance(message["content"], list) for message in prompt):
        content = [{"type": "text", "text": system_prompt}]
    return [{"role": "system", "content": content}, *prompt]
