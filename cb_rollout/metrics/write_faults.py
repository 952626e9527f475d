"""Say why a file of a run could not be written, and what to change.

Owns the sentence for each cause that a system names by `errno`. Writes nothing.
"""

import errno
import os
from pathlib import Path

_SHORTER = "The name is too long for the file system: name a shorter {setting}."
_NOT_ALLOWED = (
    "This user has no permission there: give it one, or name {article} {setting} of its own."
)
_OUT_OF_FILES = "Too many files are open: close some, or raise the limit (ulimit -n)."
_OTHER_DISK = "The disk does not answer as it should: name {article} {setting} on another one."

ADVICE = {
    errno.ENOSPC: "The disk is full: make room, or name {article} {setting} on another one.",
    errno.EDQUOT: "The disk quota of this user is used up: make room, or have it raised.",
    errno.EFBIG: "The file is as large as the system allows: raise the limit (ulimit -f).",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.EROFS: "The file system is read-only: name {article} {setting} on one that is not.",
    errno.ENOENT: "A folder of the path was removed, or cannot be made there: make it, or name "
    "another {setting}.",
    errno.EISDIR: "A folder has the name of the file: move it, or name another {setting}.",
    errno.ENAMETOOLONG: _SHORTER,
    errno.EMFILE: _OUT_OF_FILES,
    errno.ENFILE: _OUT_OF_FILES,
    errno.EIO: _OTHER_DISK,
    errno.ESTALE: _OTHER_DISK,
    errno.ENODEV: _OTHER_DISK,
}

# A file stands where a folder should be.
_FILE_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR)

_UNKNOWN = "Name another {setting}."


def write_advice(error: OSError, path: str | os.PathLike[str], setting: str) -> str:
    """Return a sentence on the cause of a failed write, and what to change.

    Args:
        error: raised by the write, or by the creation of a folder.
        path: the file or folder that could not be written.
        setting: name of the setting that holds the path, such as `output_dir`.
    """
    if error.errno in _FILE_IN_THE_WAY:
        file = _file_above(Path(os.path.abspath(path)))
        if file is not None:
            return f"{file} is a file, not a folder: move it, or name another {setting}."
    advice = ADVICE.get(error.errno or 0, _UNKNOWN)
    article = "an" if setting[0] in "aeiou" else "a"
    return advice.format(setting=setting, article=article)


def _file_above(path: Path) -> Path | None:
    """Return the path, or its nearest existing parent, if that is not a folder; else None."""
    for candidate in (path, *path.parents):
        if os.path.lexists(candidate):
            return None if candidate.is_dir() else candidate
    return None
