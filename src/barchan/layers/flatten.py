"""From the upper directory of an overlay to a tree that is a layer of its own.

overlayfs leaves two kinds of entries that mean nothing without the mount that made them: a directory that was renamed
points to where it is in the layers below, and a file of which only attributes were changed has its content there. Both are
made whole: the directory brings all that it shows and hides what lies below it, the file gets its content. What merely hides
nothing (a new directory marked opaque, a whiteout of nothing) loses its mark, so that the layer changes no more than it must
wherever it is used.

Only what the policy keeps is copied. Removals are always kept: what was deleted must not come back because a rule matches.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from barchan.errors import CreateFailed, InvalidRequest, NodeStorageFull
from barchan.kernel import syscalls
from barchan.layers import upper
from barchan.layers.lower import OPAQUE, Attributes, Lower, Parts, is_whiteout, set_attributes
from barchan.layers.scrub import Policy
from barchan.layers.tarwalk import MOST_DEPTH, MOST_ENTRIES, MOST_NAME, NODE_BYTES

PHASE = "pack"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 30
_AHEAD = 1 << 20
_SOCKETS, _DEVICES = "sockets", "devices"
_UPPER = -1
"""In place of the index of a layer below."""


class _Place(NamedTuple):
    """A directory of the layer in the making."""

    path: Parts
    upper: bool
    """It has a part in the upper directory."""
    below: Parts | None
    """Where in the layers below the rest of what it shows comes from."""
    whole: bool = False
    """That rest is to be copied."""
    covers: bool = True
    """The layers below would show through it, at its own path."""
    rule: str = ""
    """Of the policy, when of all below it only removals are kept."""


class _Made(NamedTuple):
    path: Parts
    attributes: Attributes
    opaque: bool


class Flattening:
    """One use. `source` and `target` are directories open for reading, `target` empty; `room` is in bytes.

    `run` raises `InvalidRequest` naming what no layer may hold, `NodeStorageFull`, `CreateFailed`, all in the phase `pack`.
    """

    def __init__(self, source: int, target: int, below: Lower, policy: Policy, room: int) -> None:
        self._source, self._target, self._below, self._policy = source, target, below, policy
        self._room, self._device = room, os.fstat(source).st_dev
        self._made: list[_Made] = []
        self._links: dict[tuple[int, int], Parts] = {}
        self.left_out: Counter[str] = Counter()
        self.entries = self.size = self.renamed = self.completed = 0

    def run(self) -> None:
        todo = [_Place((), True, ())]
        with _typed((), "read"):
            self._made.append(_Made((), upper.read(b".", self._source).attributes, False))
        while todo:
            todo += self._directory(todo.pop())
        for made in reversed(self._made):
            with _typed(made.path, "made"):
                self._finish(made)

    def _finish(self, made: _Made) -> None:
        """Writing into a directory changes its time, so its attributes come last."""
        fd = self._open(self._target, made.path)
        try:
            if made.opaque:
                os.setxattr(fd, OPAQUE, b"y")
            set_attributes(b".", fd, made.attributes)
        finally:
            os.close(fd)

    def _directory(self, place: _Place) -> list[_Place]:
        with self._opened(self._target, place.path) as out:
            found, names = list[_Place](), set[bytes]()
            if place.upper:
                with self._opened(self._source, place.path) as fd:
                    names = {os.fsencode(name) for name in os.listdir(fd)}
                    found += filter(None, (self._changed(place, name, fd, out) for name in sorted(names)))
            if place.whole and place.below is not None and not place.rule:
                rest = (name for name in self._below.names(place.below) if name not in names)
                found += filter(None, (self._inherited(place, name, out) for name in rest))
        return found

    # --- entries of the upper directory

    def _changed(self, place: _Place, name: bytes, fd: int, out: int) -> _Place | None:
        path = (*place.path, name)
        with _typed(path, "read"):
            entry = upper.read(name, fd)
        if entry.state.st_dev != self._device:
            raise _refused(path, "is on another file system or in another subvolume")
        if is_whiteout(entry.state):
            if self._covered(place, path):
                self._removal(path, out, entry)
            return None
        rule = place.rule or self._policy.rule_of(b"/".join(path), directory=entry.is_directory)
        if entry.is_directory:
            return self._changed_directory(place, path, out, entry, rule)
        if rule:
            self.left_out[rule] += 1
        elif stat.S_IFMT(entry.state.st_mode) in (stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK):
            self.left_out[_SOCKETS if stat.S_ISSOCK(entry.state.st_mode) else _DEVICES] += 1
        else:
            self._changed_file(place, path, fd, out, entry)
        return None

    def _removal(self, path: Parts, out: int, entry: upper.Entry) -> None:
        self._take(path, 0)
        with _typed(path, "made"):
            os.mknod(path[-1], stat.S_IFCHR, os.makedev(0, 0), dir_fd=out)
            set_attributes(path[-1], out, Attributes(0, mtime_ns=entry.attributes.mtime_ns))

    def _covered(self, place: _Place, path: Parts) -> os.stat_result | None:
        """What the layers below would show at the entry's own path."""
        found = self._below.find(path) if place.covers else None
        return found[1] if found else None

    def _changed_directory(self, place: _Place, path: Parts, out: int, entry: upper.Entry, rule: str) -> _Place | None:
        covered = self._covered(place, path)
        hides = bool(entry.opaque or entry.redirect)
        if rule and (hides or covered is None or not stat.S_ISDIR(covered.st_mode)):
            self.left_out[rule] += 1
            if hides and covered:
                self._removal(path, out, entry)
            return None
        below = self._origin(place, path, entry)
        self.renamed += bool(entry.redirect)
        self._mkdir(path, out, entry.attributes, opaque=hides and covered is not None)
        through = not hides and covered is not None and stat.S_ISDIR(covered.st_mode)
        return _Place(path, True, below, place.whole or bool(entry.redirect), through, rule)

    def _origin(self, place: _Place, path: Parts, entry: upper.Entry) -> Parts | None:
        """Where in the layers below the rest of a directory is."""
        if entry.opaque and not entry.redirect:
            return None
        if not entry.redirect:
            at = None if place.below is None else (*place.below, path[-1])
            found = self._below.find(at) if at is not None and (place.whole or place.covers) else None
            return at if found and stat.S_ISDIR(found[1].st_mode) else None
        at = upper.origin(entry.redirect, place.below)
        found = self._below.find(at) if at is not None else None
        if found is None or not stat.S_ISDIR(found[1].st_mode):
            raise _refused(path, f"was renamed from {entry.redirect!r}, which is no directory of the layers below")
        return at

    def _changed_file(self, place: _Place, path: Parts, fd: int, out: int, entry: upper.Entry) -> None:
        if self._linked(path, (_UPPER, entry.state.st_ino), entry.state, out):
            return
        if not entry.metacopy:
            return self._copy(path, fd, path[-1], out, entry.state, entry.attributes)
        at = upper.origin(entry.redirect or path[-1], place.below)
        found = self._below.find(at) if at is not None else None
        if at is None or found is None or not stat.S_ISREG(found[1].st_mode):
            raise _refused(path, f"has its content at {entry.redirect or path[-1]!r} below, where no file is")
        self.completed += 1
        with self._below.opened(at, found[0]) as source:
            self._copy(path, source, at[-1], out, found[1], entry.attributes)

    # --- entries of the layers below that a renamed directory shows

    def _inherited(self, place: _Place, name: bytes, out: int) -> _Place | None:
        assert place.below is not None
        path, at = (*place.path, name), (*place.below, name)
        found = self._below.find(at)
        if found is None:
            return None
        state, directory = found[1], stat.S_ISDIR(found[1].st_mode)
        if rule := self._policy.rule_of(b"/".join(path), directory=directory):
            self.left_out[rule] += 1
            return None
        attributes = upper.kept(self._below.attributes_of(at, found))
        if directory:
            self._mkdir(path, out, attributes, opaque=False)
            return _Place(path, False, at, True, False)
        if not self._linked(path, (found[0], state.st_ino), state, out):
            with self._below.opened(at, found[0]) as source:
                self._copy(path, source, at[-1], out, state, attributes)
        return None

    # --- what is made

    def _mkdir(self, path: Parts, out: int, attributes: Attributes, *, opaque: bool) -> None:
        self._take(path, 0)
        with _typed(path, "made"):
            os.mkdir(path[-1], 0o700, dir_fd=out)
        self._made.append(_Made(path, attributes, opaque))

    def _linked(self, path: Parts, inode: tuple[int, int], state: os.stat_result, out: int) -> bool:
        """Whether the file is here already under another name; it gets this one too."""
        first = self._links.get(inode)
        if first is None:
            if state.st_nlink > 1:
                self._links[inode] = path
            return False
        self._take(path, 0)
        with _typed(path, "made"), self._opened(self._target, first[:-1]) as beside:
            os.link(first[-1], path[-1], src_dir_fd=beside, dst_dir_fd=out, follow_symlinks=False)
        return True

    def _copy(
        self, path: Parts, fd: int, source: bytes, out: int, state: os.stat_result, attributes: Attributes
    ) -> None:
        """`state` is of the file with the content, `source` in the directory `fd`."""
        name, link = path[-1], stat.S_ISLNK(state.st_mode)
        self._take(path, state.st_size if stat.S_ISREG(state.st_mode) else 0)
        with _typed(path, "copied"):
            if link:
                os.symlink(os.readlink(source, dir_fd=fd), name, dir_fd=out)
            elif stat.S_ISFIFO(state.st_mode):
                os.mkfifo(name, 0o600, dir_fd=out)
            else:
                _copy_content(fd, source, out, name, state.st_size)
        with _typed(path, "given its attributes", attributes=True):
            set_attributes(name, out, attributes, link=link)

    def _take(self, path: Parts, size: int) -> None:
        if len(path) > MOST_DEPTH:
            raise _refused(path, f"lies more than {MOST_DEPTH} directories deep")
        if sum(map(len, path)) + len(path) > MOST_NAME:
            raise _refused(path, f"has a path of more than {MOST_NAME} bytes")
        self.entries += 1
        self.size += size
        if self.entries > MOST_ENTRIES:
            raise _refused(path, f"is beyond the limit of {MOST_ENTRIES} files")
        # Kept by its size and not by its blocks: an image has no holes.
        if self.size + self.entries * NODE_BYTES > self._room:
            raise NodeStorageFull(
                f"the changes do not fit on the disk of the layer store (at {_shown(path)})",
                hint="free disk space or pack less",
                phase=PHASE,
            )

    # --- directories

    @contextmanager
    def _opened(self, root: int, path: Parts) -> Iterator[int]:
        fd = self._open(root, path)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open(self, root: int, path: Parts) -> int:
        with _typed(path, "opened"):
            return syscalls.open_beneath(b"/".join(path) or b".", _DIRECTORY, dir_fd=root)


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


@contextmanager
def _typed(path: Parts, what: str, *, attributes: bool = False) -> Iterator[None]:
    """Failures name the file. A file system that has no room in an inode says ENOSPC too."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if attributes and (full or error.errno in (errno.E2BIG, errno.ERANGE)):
            raise _refused(path, "has more extended attributes than fit") from error
        if full:
            raise NodeStorageFull(f"no room for {_shown(path)}", hint="free disk space", phase=PHASE) from error
        raise CreateFailed(f"{_shown(path)} cannot be {what}: {error.strerror}", phase=PHASE) from error


def _refused(path: Parts, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{_shown(path)} {reason}", field="sandbox", phase=PHASE)


def _shown(path: Parts) -> str:
    """Escaped: names come from strangers."""
    return repr(b"/" + b"/".join(path)[:MOST_NAME])[1:]
