"""Read and repair JSON-lines files whose writer may be killed.

A record exists once its newline is written. Callers own its format. Any thread may call these
functions.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cb_rollout.errors import ConfigurationError, error_text

T = TypeVar("T")

_CHUNK_BYTES = 1 << 16
_PARSING_ERRORS = (ValueError, KeyError, TypeError, AttributeError, AssertionError)


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as one line of ASCII, its newline included.

    Raises:
        ValueError: a number is not finite.
    """
    return (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode("ascii")


def append_line(path: Path, line: bytes) -> None:
    """Append a whole line, unbuffered; a line that does not fit is removed again.

    Raises:
        OSError: the line cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            data = memoryview(line)
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(end)
            raise


def read_lines(path: Path, parse: Callable[[Any], T], noun: str) -> Iterator[tuple[bytes, T]]:
    """Yield each whole line and its record, leaving out a half line at the end.

    Args:
        path: the file; nothing is yielded where it does not exist.
        parse: makes a record of a line's JSON value.
        noun: the name of a record, for the error's message.

    Raises:
        ConfigurationError: a whole line is not a record.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = parse(json.loads(line))
            except _PARSING_ERRORS as error:
                raise ConfigurationError(
                    f"line {number} of {path} is not a {noun} ({error_text(error)}); remove the "
                    "line to keep the others."
                ) from error
            yield line, record


def remove_half_line(path: Path) -> None:
    """Truncate a file after its last newline, so that the next record starts a line of its own."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _CHUNK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
