"""Local files and links that appear under their names only when they are whole: made beside, under another name, and renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ArrivingFile:
    """Replaces what has the name `name` in the directory `directory`, a descriptor, when `finish` is called.

    What is replaced is never written to, be it a link or open elsewhere. All methods raise `OSError`.
    """

    def __init__(self, directory: int, name: bytes) -> None:
        _check_place(directory, name)
        self._name, self._temporary = name, temporary_name()
        self._directory = os.dup(directory)
        self._fd = -1
        try:
            self._fd = os.open(self._temporary, _CREATE, 0o600, dir_fd=directory)
        finally:
            if self._fd < 0:
                os.close(self._directory)

    def write(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            view = view[os.write(self._fd, view) :]

    def finish(self, mode: int, mtime_ns: int) -> None:
        os.fchmod(self._fd, mode)
        os.utime(self._fd, ns=(mtime_ns, mtime_ns))
        os.rename(self._temporary, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._close()

    def drop(self) -> None:
        """It does not arrive. Nothing happens once it has."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=self._directory)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)
        os.close(self._directory)


def put_link(directory: int, name: bytes, target: bytes, mtime_ns: int) -> None:
    """A symbolic link in place of what had the name."""
    _check_place(directory, name)
    temporary = temporary_name()
    os.symlink(target, temporary, dir_fd=directory)
    try:
        os.utime(temporary, ns=(mtime_ns, mtime_ns), dir_fd=directory, follow_symlinks=False)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(temporary, dir_fd=directory)
        raise


def temporary_name() -> bytes:
    return b".barchan-" + secrets.token_hex(8).encode()


def _check_place(directory: int, name: bytes) -> None:
    """Before anything is fetched for it."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(name))
