"""Store checkpoints of adapters in a folder, under URIs such as `tinker://RUN/KIND/NAME`.

Clients never see paths on this machine. The job thread saves and loads; the server's threads look
checkpoints up.
"""

import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cb_rollout.errors import InvalidRequestError, error_text
from cb_rollout.server.tinker.policies import Checkpoint, LoraSettings

SCHEME = "tinker://"
TRAINING = "weights"
SAMPLER = "sampler_weights"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[0-9a-f]+:train:[0-9]+")
_URI = re.compile(rf"{SCHEME}({_RUN.pattern})/({TRAINING}|{SAMPLER})/({_NAME.pattern})")


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint as `find` saw it; saving it again under the same URI makes a new one."""

    uri: str
    written: tuple[int, int, int]
    """Inode, size in bytes, and time in nanoseconds."""


class CheckpointStore:
    """A folder of checkpoints."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, readable by this user alone."""
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(
        self, run: str, kind: str, name: str | None, checkpoint: Checkpoint, *, overwrite: bool
    ) -> str:
        """Write a checkpoint; return its URI.

        Args:
            run: id of the training run.
            kind: `TRAINING` or `SAMPLER`.
            name: the client's name for the checkpoint; None: a random name is made.
            checkpoint: the checkpoint to write.
            overwrite: replace a checkpoint with that name.

        Raises:
            InvalidRequestError: the name is taken, or is not a valid file name.
        """
        name = secrets.token_hex(8) if name is None else name
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"name={name!r} is no name of a checkpoint; use letters, digits, '.', '_' and '-'."
            )
        path = self._file(run, kind, name)
        if path.exists() and not overwrite:
            raise InvalidRequestError(
                f"{SCHEME}{run}/{kind}/{name} exists; choose another name, or overwrite it."
            )
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # If the server is killed while it writes, the old checkpoint stays whole.
        partial = path.with_name(f"{name}.{secrets.token_hex(4)}.partial")
        content = {
            "lora": asdict(checkpoint.lora),
            "weights": checkpoint.weights,
            "optimizer": checkpoint.optimizer,
        }
        torch.save(content, partial)
        partial.replace(path)
        return f"{SCHEME}{run}/{kind}/{name}"

    def find(self, uri: str) -> StoredCheckpoint:
        """Return the checkpoint that a URI currently names.

        Raises:
            InvalidRequestError: the URI has no checkpoint.
        """
        try:
            return StoredCheckpoint(uri, _written(self._path(uri).stat()))
        except FileNotFoundError:
            raise _missing(uri) from None

    def load(self, checkpoint: str | StoredCheckpoint) -> Checkpoint:
        """Load the checkpoint of a URI, or the checkpoint that `find` returned.

        Raises:
            InvalidRequestError: there is no checkpoint, it was saved again since `find`, or it
                cannot be read.
        """
        if isinstance(checkpoint, str):
            uri, found = checkpoint, None
        else:
            uri, found = checkpoint.uri, checkpoint
        path = self._path(uri)
        try:
            with path.open("rb") as stream:
                written = _written(os.fstat(stream.fileno()))
                is_same = found is None or found.written == written
                content = torch.load(stream, map_location="cpu", weights_only=True)
            read = Checkpoint(
                lora=LoraSettings(**content["lora"]),
                weights=content["weights"],
                optimizer=content["optimizer"],
            )
        except FileNotFoundError:
            raise _missing(uri) from None
        except Exception as error:
            raise InvalidRequestError(f"{uri} cannot be read ({error_text(error)}).") from error
        if not is_same:
            raise InvalidRequestError(
                f"{uri} was saved anew after this sampling client was made, whose weights are no "
                "longer in memory; create a sampling client of the new ones."
            )
        return read

    def _path(self, uri: str) -> Path:
        match = _URI.fullmatch(uri)
        if match is None:
            raise InvalidRequestError(
                f"{uri!r} is no URI of a checkpoint, as {SCHEME}RUN/{TRAINING}/NAME."
            )
        run, kind, name = match.groups()
        return self._file(run, kind, name)

    def _file(self, run: str, kind: str, name: str) -> Path:
        # Not every file system allows a colon.
        return self._folder / run.replace(":", "-") / kind / name


def _written(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _missing(uri: str) -> InvalidRequestError:
    return InvalidRequestError(f"there is no checkpoint {uri}.")
