"""Reads an offline run of wandb: the rows of its `.wandb` file.

The file is a log of LevelDB's: blocks of 32 KiB with records, which may be cut into chunks. Each
record is a protocol buffer of wandb.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

FILE_HEADER = struct.Struct("<4sHB")
CHUNK_HEADER = struct.Struct("<IHB")
BLOCK_BYTES = 32 * 1024
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, and fail if it is no file of wandb."""
    data = path.read_bytes()
    assert FILE_HEADER.unpack_from(data) == (b":W&B", 0xBEE1, 0), data[:7]
    at, parts = FILE_HEADER.size, b""
    while at + CHUNK_HEADER.size <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < CHUNK_HEADER.size:
            # The end of a block is padded.
            at += left
            continue
        _, num_bytes, kind = CHUNK_HEADER.unpack_from(data, at)
        at += CHUNK_HEADER.size
        parts += data[at : at + num_bytes]
        at += num_bytes
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the logged rows of the one offline run in a folder, by name, in order."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    logged = []
    for record in records(path):
        if record.HasField("history"):
            row: dict[str, Any] = {}
            for item in record.history.item:
                name, *inner = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                if inner:
                    row.setdefault(name, {})[inner[0]] = value
                else:
                    row[name] = value
            logged.append(row)
    return logged


def table(folder: Path, cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a logged table, each by column."""
    (path,) = folder.glob(f"wandb/offline-run-*/files/{cell['path']}")
    found = json.loads(path.read_text())
    return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]
