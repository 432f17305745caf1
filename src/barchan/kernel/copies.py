"""Small files of the node's that sandboxes read: each gets one of its own, so that no lock or watch on it is shared.

All are on one tmpfs, mounted where nobody but root comes. A file has a name there only until its mount is attached (the kernel attaches
none whose root has no name), and goes with its last mount.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import NamedTuple

from barchan.kernel import directories, mounts, syscalls

_ATTRIBUTES = syscalls.ATTR_RDONLY | syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV | syscalls.ATTR_NOEXEC
_OPTIONS = (("source", "node"), ("mode", "0700"))


class Copy(NamedTuple):
    """One in the making."""

    fd: int
    """Detached, read-only mount of the file."""
    path: Path

    def close(self) -> None:
        """Once it is attached, or nobody wants it."""
        os.close(self.fd)
        self.path.unlink(missing_ok=True)


class Copies:
    """Blocking; raises `OSError`."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def prepare(self) -> None:
        """Mounts the tmpfs, unless an agent before did; what that left half-made goes."""
        directories.private(self._place)
        for path in self._place.iterdir():
            path.unlink()
        if mounts.top(self._place) is None:
            fd = syscalls.new_mount(
                "tmpfs", _OPTIONS, syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV | syscalls.ATTR_NOEXEC
            )
            try:
                syscalls.move_mount(fd, self._place)
            finally:
                os.close(fd)

    def open(self, content: bytes) -> Copy:
        """A file with this content that everybody may read; the caller closes it."""
        path = self._place / secrets.token_hex(8)
        try:
            _write(path, content)
            return Copy(_detached(path), path)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Unmounts. What was handed out stays. Idempotent."""
        if mounts.top(self._place) is not None:
            syscalls.unmount(self._place, detach=True)


def _write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    try:
        os.fchmod(fd, 0o444)
        os.write(fd, content)
    finally:
        os.close(fd)


def _detached(path: Path) -> int:
    fd = syscalls.open_tree(path, clone=True)
    try:
        syscalls.set_mount_attributes(fd, add=_ATTRIBUTES)
    except OSError:
        os.close(fd)
        raise
    return fd
