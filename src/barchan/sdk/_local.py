"""Files on the caller's side: their trouble in our error tree."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from barchan.errors import (
    FileAlreadyExists,
    FileDenied,
    FileFailure,
    FileIsDirectory,
    FileMissing,
    FileNotDirectory,
    InvalidRequest,
)

_KINDS: dict[int | None, type[FileFailure]] = {
    errno.ENOENT: FileMissing,
    errno.EACCES: FileDenied,
    errno.EPERM: FileDenied,
    errno.EROFS: FileDenied,
    errno.EEXIST: FileAlreadyExists,
    errno.EISDIR: FileIsDirectory,
    errno.ENOTDIR: FileNotDirectory,
}


def local_path(local: str | os.PathLike[str]) -> Path:
    """Raises `InvalidRequest`."""
    try:
        path = Path(os.fsdecode(local))
        if b"\0" in os.fsencode(path):
            raise ValueError("it has a NUL byte")
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"local: {local!r} is no path", field="local", hint=str(error)) from error
    return path


@contextlib.contextmanager
def local_files(root: Path) -> Iterator[None]:
    """`FileFailure` or a subclass instead of the `OSError` of something below `root`."""
    try:
        yield
    except OSError as error:
        # Names below an opened directory are relative; without any it is the file being written.
        name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
        where = name if os.path.isabs(name) or not name else f"{name} below {root}"
        kind = _KINDS.get(error.errno, FileFailure)
        raise kind(
            f"local file {where or root}: {(error.strerror or str(error)).lower()}",
            hint="on this side, not in the sandbox",
        ) from error


def local_size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory. Raises `OSError`."""
    found = path.stat()
    return sum(_sizes(os.fspath(path))) if stat.S_ISDIR(found.st_mode) else found.st_size


def _sizes(path: str) -> Iterator[int]:
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _sizes(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield entry.stat(follow_symlinks=False).st_size
