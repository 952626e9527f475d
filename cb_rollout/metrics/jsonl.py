"""Write, read and repair files whose writer may be killed: JSON lines, and whole files.

A record exists once its newline is written. Callers define its format. Any thread may call this.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from cb_rollout.errors import ConfigurationError, error_text

T = TypeVar("T")

_PARSING_ERRORS = (ValueError, KeyError, TypeError, AttributeError, AssertionError)


def write_whole(path: Path, content: bytes, *, survives_power_failure: bool = False) -> None:
    """Write a file as a whole, or raise `OSError` and leave the previous file as it was."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            if survives_power_failure:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of ASCII with its newline; `ValueError`: a number is not finite."""
    return (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode("ascii")


def append_lines(file: FileIO, lines: bytes) -> None:
    """Append lines, unbuffered; if only some fit, keep these whole lines and raise `OSError`."""
    start = file.seek(0, os.SEEK_END)
    num_written = 0
    try:
        while num_written < len(lines):
            num_written += file.write(lines[num_written:])
    except OSError:
        # -1 if no line is complete, so that none of the written bytes stay.
        last_newline = lines.rfind(b"\n", 0, num_written)
        file.truncate(start + last_newline + 1)
        raise


def read_records(
    path: Path, parse: Callable[[Any], T], noun: str, *, is_complete: bool = False
) -> Iterator[T]:
    """Yield what `parse` makes of each JSON line; `ConfigurationError`: a line is not a `noun`.

    A last line without its newline is half-written, and left out, unless the file `is_complete`.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            is_half_written = not is_complete and not line.endswith(b"\n")
            if is_half_written:
                return
            try:
                record = parse(json.loads(line))
            except _PARSING_ERRORS as error:
                raise ConfigurationError(
                    f"line {number} of {path} is not a {noun} ({error_text(error)}); remove the "
                    "line to keep the others."
                ) from error
            yield record


def remove_half_line(path: Path) -> None:
    """Truncate a file after its last newline, so that the next record starts on a new line."""
    # An empty file cannot be mapped.
    if path.is_file() and path.stat().st_size:
        with path.open("r+b") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                end = data.rfind(b"\n") + 1
            file.truncate(end)
