"""Sources of rows: a JSONL file, a Parquet file, or a data set of the `datasets` library.

Read one row at a time, unchecked; `rows` checks them.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cb_rollout.errors import ConfigurationError, error_text

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIX = ".parquet"
# Rows decoded together: a few megabytes of long chats.
PARQUET_BATCH_ROWS = 256


class RawRow(NamedTuple):
    """A row as it was read, or the problem in its place."""

    label: str
    """File and line, or data set and row, for messages."""
    value: Any
    """The row; None where it could not be read."""
    problem: str | None = None
    """Reason why it could not be read; None: it could."""


# Read the rows from the start, always in the same order.
Source = Callable[[], Iterator[RawRow]]


def create_source(name: str, *, split: str = "train", subset: str | None = None) -> Source:
    """Open a source.

    Args:
        name: a JSONL or Parquet file, a directory, or the name of a data set on the hub.
        split: split of a data set; files have none.
        subset: name of the subset of a data set; None: its only one.

    Raises:
        ConfigurationError: the source does not exist or cannot be read.
    """
    path = Path(name)
    try:
        is_file = path.is_file()
        if is_file:
            path.open("rb").close()
    except OSError as error:
        raise ConfigurationError(f"{name} cannot be read ({error.strerror}).") from error
    if path.suffix in JSONL_SUFFIXES or path.suffix == PARQUET_SUFFIX or is_file:
        if not is_file:
            state = "is not a file" if path.exists() else "does not exist"
            raise ConfigurationError(f"{name} {state}; pass a JSONL or Parquet file.")
        if path.suffix in JSONL_SUFFIXES:
            return lambda: _jsonl_rows(path)
        if path.suffix == PARQUET_SUFFIX:
            return _parquet_source(path)
        known = ", ".join((*JSONL_SUFFIXES, PARQUET_SUFFIX))
        raise ConfigurationError(f"{name} ends in none of {known}; convert it to one of them.")
    return _dataset_source(name, split, subset)


def _jsonl_rows(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            label = f"{path} line {number}"
            try:
                yield RawRow(label, json.loads(line))
            except (ValueError, RecursionError) as error:
                yield RawRow(label, None, f"is not JSON ({error})")


def _parquet_source(path: Path) -> Source:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigurationError(f"{path} is not a Parquet file ({error}).") from error

    def rows() -> Iterator[RawRow]:
        batches = file.iter_batches(batch_size=PARQUET_BATCH_ROWS)
        values = (value for batch in batches for value in batch.to_pylist())
        return (RawRow(f"{path} row {number}", value) for number, value in enumerate(values))

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
    return lambda: (
        RawRow(f"{name} {split} row {number}", dict(row)) for number, row in enumerate(dataset)
    )
