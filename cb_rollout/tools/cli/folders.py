"""Whether a command can write to a folder, asked before it begins."""

import tempfile
from pathlib import Path

from cb_rollout.errors import ConfigurationError


def require_writable(folder: Path) -> None:
    """Make a folder where there is none, before minutes are spent on what could not be kept.

    Raises:
        ConfigurationError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be made ({error.strerror}).") from error
    try:
        # Whose permissions say that they may, may still not: a file system can be read-only.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written to ({error.strerror}).") from error
