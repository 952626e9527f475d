"""A disk that refuses all writes from one on, because it is full or for another cause."""

import errno
import io
import os
from contextlib import contextmanager
from pathlib import Path


class _File:
    """A file whose writes the disk takes, or takes half of."""

    def __init__(self, file, disk):
        self._file, self._disk = file, disk

    def write(self, data):
        if not self._disk.has_room():
            self._file.write(data[: len(data) // 2])
            raise self._disk.fault()
        return self._file.write(data)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._file, name)


class FullDisk:
    """Counts the writes, files and folders made under a folder, and refuses all from one on."""

    def __init__(self, folder, first_refused, number=errno.ENOSPC):
        self._folder, self._first_refused, self.num_writes = Path(folder), first_refused, 0
        self._number = number

    def fault(self):
        return OSError(self._number, os.strerror(self._number))

    def has_room(self):
        self.num_writes += 1
        return self.num_writes < self._first_refused

    def _require_room(self):
        if not self.has_room():
            raise self.fault()

    @contextmanager
    def mounted(self, monkeypatch):
        make_folder, open_file = os.mkdir, io.open

        def mkdir(path, *rest, **named):
            if Path(path).is_relative_to(self._folder) and not os.path.exists(path):
                self._require_room()
            return make_folder(path, *rest, **named)

        def opened(path, mode="r", *rest, **named):
            is_written = set(mode) & set("wax+") and isinstance(path, str | os.PathLike)
            if not (is_written and Path(path).is_relative_to(self._folder)):
                return open_file(path, mode, *rest, **named)
            if not os.path.exists(path):
                self._require_room()
            return _File(open_file(path, mode, *rest, **named), self)

        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", mkdir)
            patch.setattr(io, "open", opened)
            yield self
