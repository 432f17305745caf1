"""A directory tree that becomes a layer: files and directories of other layers, copied below one descriptor and bounded."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from barchan.errors import CreateFailed, InvalidRequest, NodeStorageFull
from barchan.kernel import syscalls
from barchan.layers.lower import OPAQUE, Attributes, Parts, set_attributes
from barchan.layers.tarwalk import MOST_DEPTH, MOST_ENTRIES, MOST_NAME, NODE_BYTES

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 30
_AHEAD = 1 << 20


class _Made(NamedTuple):
    path: Parts
    attributes: Attributes
    opaque: bool


class LayerTree:
    """One use: `root`, then what is in it, directories before what is in them, then `finish`.

    `target` is an empty directory, open for reading; `room` is in bytes. Errors carry `phase`, and `field` when what is to be
    copied is at fault: `InvalidRequest` naming what no layer may hold, `NodeStorageFull`, `CreateFailed`.
    """

    def __init__(self, target: int, room: int, *, phase: str, field: str) -> None:
        self._target, self._room, self._phase, self._field = target, room, phase, field
        self._made: list[_Made] = []
        self._links: dict[tuple[int, int], Parts] = {}
        self.entries = self.size = 0

    def root(self, attributes: Attributes) -> None:
        self._made.append(_Made((), attributes, False))

    def mkdir(self, path: Parts, out: int, attributes: Attributes, *, opaque: bool) -> None:
        self._take(path, 0)
        with self.typed(path, "made"):
            os.mkdir(path[-1], 0o700, dir_fd=out)
        self._made.append(_Made(path, attributes, opaque))

    def linked(self, path: Parts, inode: tuple[int, int], state: os.stat_result, out: int) -> bool:
        """Whether the file is here already under another name; it gets this one too."""
        first = self._links.get(inode)
        if first is None:
            if state.st_nlink > 1:
                self._links[inode] = path
            return False
        self._take(path, 0)
        with self.typed(path, "made"), self.opened(first[:-1]) as beside:
            os.link(first[-1], path[-1], src_dir_fd=beside, dst_dir_fd=out, follow_symlinks=False)
        return True

    def copy(
        self, path: Parts, fd: int, source: bytes, out: int, state: os.stat_result, attributes: Attributes
    ) -> None:
        """`state` is of the file with the content, `source` in the directory `fd`."""
        name, link = path[-1], stat.S_ISLNK(state.st_mode)
        self._take(path, state.st_size if stat.S_ISREG(state.st_mode) else 0)
        with self.typed(path, "copied"):
            if link:
                os.symlink(os.readlink(source, dir_fd=fd), name, dir_fd=out)
            elif stat.S_ISFIFO(state.st_mode):
                os.mkfifo(name, 0o600, dir_fd=out)
            else:
                _copy_content(fd, source, out, name, state.st_size)
        with self.typed(path, "given its attributes", attributes=True):
            set_attributes(name, out, attributes, link=link)

    def _take(self, path: Parts, size: int) -> None:
        if len(path) > MOST_DEPTH:
            raise self.refused(path, f"lies more than {MOST_DEPTH} directories deep")
        if sum(map(len, path)) + len(path) > MOST_NAME:
            raise self.refused(path, f"has a path of more than {MOST_NAME} bytes")
        self.entries += 1
        self.size += size
        if self.entries > MOST_ENTRIES:
            raise self.refused(path, f"is beyond the limit of {MOST_ENTRIES} files")
        # Kept by its size and not by its blocks: an image has no holes.
        if self.size + self.entries * NODE_BYTES > self._room:
            raise NodeStorageFull(
                f"the layer does not fit on the disk of the layer store (at {shown(path)})",
                hint="free disk space",
                phase=self._phase,
            )

    def removal(self, path: Parts, out: int, mtime_ns: int) -> None:
        """A whiteout."""
        self._take(path, 0)
        with self.typed(path, "made"):
            os.mknod(path[-1], stat.S_IFCHR, os.makedev(0, 0), dir_fd=out)
            set_attributes(path[-1], out, Attributes(0, mtime_ns=mtime_ns))

    def finish(self) -> None:
        """Writing into a directory changes its time, so attributes of directories come last."""
        for made in reversed(self._made):
            with self.typed(made.path, "made"), self.opened(made.path) as fd:
                if made.opaque:
                    os.setxattr(fd, OPAQUE, b"y")
                set_attributes(b".", fd, made.attributes)

    @contextmanager
    def opened(self, path: Parts) -> Iterator[int]:
        """A directory of the new tree."""
        with self.typed(path, "opened"):
            fd = syscalls.open_beneath(b"/".join(path) or b".", _DIRECTORY, dir_fd=self._target)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def typed(self, path: Parts, what: str, *, attributes: bool = False) -> Iterator[None]:
        """Failures name the file. A file system that has no room in an inode says ENOSPC too."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if attributes and (full or error.errno in (errno.E2BIG, errno.ERANGE)):
                raise self.refused(path, "has more extended attributes than fit") from error
            if full:
                raise NodeStorageFull(
                    f"no room for {shown(path)}", hint="free disk space", phase=self._phase
                ) from error
            raise CreateFailed(f"{shown(path)} cannot be {what}: {error.strerror}", phase=self._phase) from error

    def refused(self, path: Parts, reason: str) -> InvalidRequest:
        return InvalidRequest(f"{shown(path)} {reason}", field=self._field, phase=self._phase)


def _copy_content(fd: int, source: bytes, out: int, name: bytes, size: int) -> None:
    """Holes stay holes."""
    taken = syscalls.open_beneath(source, os.O_RDONLY, dir_fd=fd)
    try:
        made = os.open(name, _NEW, 0o600, dir_fd=out)
        try:
            for offset, length in _data(taken, size):
                _copy_piece(taken, made, offset, length)
            if size:
                os.ftruncate(made, size)
                # Shared blocks are not in the page cache under this file: mkfs.erofs would wait for each small one.
                os.posix_fadvise(made, 0, min(size, _AHEAD), os.POSIX_FADV_WILLNEED)
        finally:
            os.close(made)
    finally:
        os.close(taken)


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of each run of data."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if start < end:
            yield start, end - start


def _copy_piece(taken: int, made: int, offset: int, length: int) -> None:
    while length:
        done = _copied(taken, made, offset, min(length, _PIECE))
        if not done:
            raise OSError(errno.EIO, "the file is shorter than it says")
        offset, length = offset + done, length - done


def _copied(taken: int, made: int, offset: int, length: int) -> int:
    """copy_file_range shares the blocks within one btrfs, and refuses between two kinds of file systems."""
    try:
        return os.copy_file_range(taken, made, length, offset, offset)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP):
            raise
    os.lseek(made, offset, os.SEEK_SET)
    return os.sendfile(made, taken, offset, length)


def shown(path: Parts) -> str:
    """Escaped: names come from strangers."""
    return repr(b"/" + b"/".join(path)[:MOST_NAME])[1:]
