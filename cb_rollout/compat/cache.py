"""Own the folder of this user's cached files, some of which are loaded as code.

Refuses a folder or a file that another user made or may write to. Any thread may call.
"""

import os
import stat
from pathlib import Path

from cb_rollout.errors import ConfigurationError

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(name: str = "") -> Path:
    """Return `$XDG_CACHE_HOME/cb_rollout`, else `~/.cache/cb_rollout`, or a folder in it.

    It is made if it is missing. Only this user may enter it.

    Raises:
        ConfigurationError: another user made it or may write to it, or it cannot be written.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (caches / "cb_rollout", caches / "cb_rollout" / name):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_own(folder)
            folder.chmod(0o700)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError("it cannot be written")
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be used as a cache ({error}); set XDG_CACHE_HOME to a folder of "
                "your own."
            ) from error
    # Links are followed here: another user could turn one later.
    return folder.resolve()


def require_own(path: Path) -> None:
    """Raise `ConfigurationError` if another user made a file or folder or may write to it."""
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
        raise ConfigurationError(
            f"{path} is of user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}, so "
            "another user may have written what would be loaded; remove it, or set XDG_CACHE_HOME "
            "to a folder of your own."
        )
