"""Rows of a data set: their sources, their checks, and their prompts as an engine takes them.

A row has a prompt or messages, a unique id, and no key of results; its pictures are data URLs, or
paths relative to the input's folder. Rows are read singly and twice: by `survey`, then by `rows`.
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
# Rows decoded together: a few megabytes of long chats.
PARQUET_BATCH_ROWS = 256

# Beginnings of a picture's name that is no path.
URLS = ("data:", "http:", "https:")

# In place of the digest of a picture that cannot be read; its row becomes an error.
UNREADABLE = "unreadable"

# Keys that a result adds to its row.
RESULT_KEYS = (
    "sample", "completion", "token_ids", "finish_reason", "logprobs", "error", "scores",
)  # fmt: skip

RowId = int | str

# Read the rows from the start, always in the same order: the label of each for messages, such as
# its file and line, and its value, or the error in its place.
Source = Callable[[], Iterator[tuple[str, Any]]]


def create_source(name: str, *, split: str = "train", subset: str | None = None) -> Source:
    """Open a JSONL or Parquet file, or a data set of a directory or the hub by split and subset.

    `ConfigurationError`: it does not exist or cannot be read.
    """
    path, ends = Path(name), (*JSONL_SUFFIXES, PARQUET_SUFFIX)
    try:
        is_file = path.is_file()
        if is_file:
            path.open("rb").close()
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be read ({error.strerror}).") from error
    if is_file and path.suffix not in ends:
        why = f"ends in none of {', '.join(ends)}; convert it to one of them."
        raise ConfigurationError(f"{name} {why}")
    if path.suffix in ends and not is_file:
        state = "is not a file" if path.exists() else "does not exist"
        raise ConfigurationError(f"{name} {state}; pass a JSONL or Parquet file.")
    if path.suffix in JSONL_SUFFIXES:
        return partial(_jsonl_rows, path)
    return _parquet_source(path) if is_file else _dataset_source(name, split, subset)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
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
        if any((Path(name) / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(name)
            dataset = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            dataset = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        raise ConfigurationError(
            f"split {split!r} of {name!r} cannot be loaded ({error_text(error)}); pass a file, a "
            "data set's directory or name, and its split and subset."
        ) from error
    return lambda: ((f"{name} {split} row {n}", dict(row)) for n, row in enumerate(dataset))


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
    """Of the rows in their order, which name their pictures."""
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
        if problem := _problem_of(value):
            raise InvalidRequestError(f"{label} {problem}. Nothing was generated.")
        row = _row(number, label, value)
        if (other := labels.setdefault(row.id, label)) != label:
            raise InvalidRequestError(f"{label} has the id {row.id!r} of {other}; rename one.")
        digest.update(json.dumps([row.id, row.values]).encode())
        for name in _picture_names(row):
            # A data URL stands in the row, and other URLs are never fetched.
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
    return (_row(number, *labelled) for number, labelled in enumerate(source()))


def _row(number: int, label: str, value: Mapping[str, Any]) -> Row:
    # Columnar files have every key in every row.
    values: dict[str, Any] = {
        name: item
        for name, item in value.items()
        if item is not None or name not in ("id", "prompt", "messages", "images")
    }
    return Row(label, values.pop("id", number), values)


def _problem_of(value: Any) -> str | None:
    """Return the reason why a row cannot be used, without a model; None: it can."""
    if isinstance(value, Exception):
        return f"is not JSON ({value})"
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
    if problem := _problem_of_prompt(given[0], value[given[0]]):
        return problem
    if not isinstance(value.get("images"), list | None):
        return "has images that are not a list"
    others = [name for name in _image_names(value) if not isinstance(name, str)]
    return f"has the image {others[0]!r:.80}, which is not a path" if others else None


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


def _picture_names(row: Row) -> list[str]:
    """Return the names of a row's pictures: those of its chat, or the row's in their place."""
    return list(row.values.get("images") or _image_names(row.values))


def _image_names(row: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what names the pictures of a row: of `images`, then of its chat's parts."""
    yield from row.get("images") or ()
    for chat in filter(is_chat, (row.get("prompt"), row.get("messages"))):
        yield from (name for part in image_parts(chat) if (name := picture_of(part)) is not None)


def encoded_prompt(tokenizer: Any, options: DatasetOptions, folder: Path, row: Row) -> Encoded:
    """Return a row's prompt as an engine takes it; paths of pictures are relative to `folder`.

    `InvalidRequestError`: it does not fit the tokenizer or the options, or has no such picture.
    """
    prompt: Any = row.values["prompt"] if "prompt" in row.values else row.values["messages"]
    system_prompt = options.system_prompt
    images = [x if x.startswith(URLS) else str(folder / x) for x in _picture_names(row)]
    if options.chat and isinstance(prompt, str):
        text = {"type": "text", "text": prompt}
        content = [*({"type": "image"} for _ in images), text] if images else prompt
        prompt = [{"role": "user", "content": content}]
    if system_prompt is not None and isinstance(prompt, str):
        raise InvalidRequestError(
            "the prompt is text, which cannot follow a system prompt; set chat to make each text a "
            "chat, or leave system_prompt out."
        )
    if system_prompt is not None and is_chat(prompt):
        if prompt[0]["role"] == "system":
            raise InvalidRequestError(
                "the chat has a system message of its own; take it out, or leave system_prompt out."
            )
        # Templates of processors read either texts or parts in every message.
        has_parts = any(isinstance(message["content"], list) for message in prompt)
        content = [{"type": "text", "text": system_prompt}] if has_parts else system_prompt
        prompt = [{"role": "system", "content": content}, *prompt]
    whole = {"prompt": prompt, "images": images} if images else prompt
    try:
        (found,) = encoded([whole], tokenizer)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error).removeprefix("input 0: ")) from error
    return found
