"""Tree items (see the guest protocol) to and from local files.

What comes from a sandbox is hostile. Extraction opens each directory relative to the one above it and follows no link, so that
nothing outside the target is ever touched; a name that tries is refused and ends the transfer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

import msgspec

from barchan.errors import FileFailure, ProtocolError
from barchan.sdk._arriving import ArrivingFile, put_link
from barchan.wire.guest import ITEM_KINDS, KEEP, Cursor, Entry, blob, encode_entry, read_entry

PIECE = 128 << 10
MAX_PIECE = 1 << 20
_MAX_NAME = 1 << 16
_U32 = struct.Struct("<I")
_FIXED = 36
_NAMED, _PER_NAME = 1 << 20, 128
"""Bytes of memory for the names of what was skipped, and what each takes beside its length."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


_RawPath = bytes
SkipReason = Literal["special", "link_out", "unreadable"]
"""A FIFO, socket or device; a link that leads out of the tree; what the user may not read."""


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an upload or download did."""

    files: int
    """Regular files."""
    bytes: int
    """Their contents."""
    skipped: dict[_RawPath, SkipReason] = {}
    """What was not transferred, by path relative to the tree: `special` FIFOs, sockets and devices; in a download,
    `link_out` links that lead out of the tree, and what is `unreadable` for the user. The first of them, up to 1 MiB of paths."""
    skipped_more: dict[SkipReason, int] = {}
    """How many were not transferred beyond those."""


def pack_tree(root: Path, report: list[TransferReport]) -> Iterator[bytes]:
    """The items of a directory, as pieces of bytes; at the end the report is appended. Raises `OSError`."""
    counter = _Counter()
    yield from _pack(root, b"", counter)
    report.append(counter.report())


def pack_file(path: Path, name: bytes, report: list[TransferReport]) -> Iterator[bytes]:
    """One item. A link is followed: the caller named it."""
    counter = _Counter()
    yield from _pack_file(path, entry_of(name, os.stat(path)), counter)
    report.append(counter.report())


class _Counter:
    def __init__(self) -> None:
        self.files = 0
        self.size = 0
        self._skipped: dict[bytes, SkipReason] = {}
        self._skipped_more: dict[SkipReason, int] = {}
        self._room = _NAMED

    def skip(self, path: bytes, why: SkipReason) -> None:
        self._room -= len(path) + _PER_NAME
        if self._room >= 0:
            self._skipped[path] = why
        else:
            self._skipped_more[why] = self._skipped_more.get(why, 0) + 1

    def report(self) -> TransferReport:
        return TransferReport(files=self.files, bytes=self.size, skipped=self._skipped, skipped_more=self._skipped_more)


_KINDS = {
    stat.S_IFREG: "f",
    stat.S_IFDIR: "d",
    stat.S_IFLNK: "l",
    stat.S_IFIFO: "p",
    stat.S_IFSOCK: "s",
    stat.S_IFCHR: "c",
    stat.S_IFBLK: "b",
}


def entry_of(path: bytes, found: os.stat_result, target: bytes = b"") -> Entry:
    """Owners are not sent: local user ids mean nothing in a sandbox."""
    kind = _KINDS[stat.S_IFMT(found.st_mode)]
    size = found.st_size if kind == "f" else 0
    return Entry(path, kind, stat.S_IMODE(found.st_mode), KEEP, KEEP, 1, size, found.st_mtime_ns, target)


def _pack(root: Path, path: bytes, counter: _Counter) -> Iterator[bytes]:
    local = os.path.join(os.fsencode(root), path) if path else os.fsencode(root)
    # The top is what the caller named, so a link there is followed; inside the tree links are sent as links.
    found = os.lstat(local) if path else os.stat(local)
    kind = _KINDS[stat.S_IFMT(found.st_mode)]
    if kind == "f":
        yield from _pack_file(Path(os.fsdecode(local)), entry_of(path, found), counter)
    elif kind == "l":
        yield encode_entry(entry_of(path, found, os.readlink(local)))
    elif kind == "d":
        yield encode_entry(entry_of(path, found))
        for name in sorted(os.listdir(local)):
            yield from _pack(root, os.path.join(path, name), counter)
    else:
        counter.skip(path, "special")


def _pack_file(local: Path, entry: Entry, counter: _Counter) -> Iterator[bytes]:
    if entry.kind != "f":
        raise FileFailure(f"{local} is not a regular file")
    with local.open("rb", buffering=0) as file:
        yield encode_entry(entry)
        counter.files += 1
        while piece := file.read(PIECE):
            counter.size += len(piece)
            yield blob(piece)
    yield blob(b"")


class TreeReader:
    """Cuts a byte stream into entries and pieces. Pure; keeps at most one incomplete entry or piece."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._in_file = False

    def feed(self, data: bytes) -> Iterator[Entry | bytes]:
        """Entries; after one of kind `f` its pieces as bytes, the last one empty. Raises `ProtocolError`."""
        buffer = self._buffer
        buffer += data
        at = 0
        while True:
            size = self._piece_size(at) if self._in_file else self._entry_size(at)
            if size is None or len(buffer) - at < size:
                break
            raw = bytes(buffer[at : at + size])
            at += size
            if self._in_file:
                self._in_file = size > 4
                yield raw[4:]
            else:
                entry = read_entry(Cursor(raw), ITEM_KINDS)
                self._in_file = entry.kind == "f"
                yield entry
        del buffer[:at]

    def end(self) -> None:
        """Raises `ProtocolError` when the stream stopped inside an item."""
        if self._buffer or self._in_file:
            raise ProtocolError("the tree ends inside an item")

    def _blob_size(self, at: int, most: int) -> int | None:
        if len(self._buffer) - at < 4:
            return None
        size = int(_U32.unpack_from(self._buffer, at)[0])
        if size > most:
            raise ProtocolError(f"a part of the tree is too long: {size} bytes")
        return 4 + size

    def _piece_size(self, at: int) -> int | None:
        return self._blob_size(at, MAX_PIECE)

    def _entry_size(self, at: int) -> int | None:
        path = self._blob_size(at, _MAX_NAME)
        if path is None:
            return None
        target = self._blob_size(at + path + _FIXED, _MAX_NAME)
        return None if target is None else path + _FIXED + target


def parts_of(path: bytes) -> list[bytes]:
    """The components of an item's path. Raises `ProtocolError` for one that could lead elsewhere."""
    if not path:
        return []
    parts = path.split(b"/")
    if b"\0" in path or any(part in (b"", b".", b"..") for part in parts):
        raise ProtocolError(f"the sandbox sent a path that leads outside: {os.fsdecode(path)!r}")
    return parts


def leads_out(parts: list[bytes], target: bytes) -> bool:
    """Whether a link at `parts` could point outside the tree. `..` after a name counts as that: the name may be a link."""
    if target.startswith(b"/") or not parts:
        return True
    steps = target.split(b"/")
    ups = 0
    while ups < len(steps) and steps[ups] == b"..":
        ups += 1
    return ups >= len(parts) or b".." in steps[ups:]


class _Around:
    """The directories around the item that is being written: all that must be remembered of a tree in which what a directory
    holds follows it. Pure; one path, and a few numbers for each directory in it."""

    def __init__(self) -> None:
        self._path: list[bytes] = []
        self._levels: list[tuple[int, int, int]] = []
        """Of each directory, how many parts of the path lead to it, its mode and its time."""

    def enter(self, parts: list[bytes], mode: int, mtime_ns: int) -> None:
        self._path = parts
        self._levels.append((len(parts), mode, mtime_ns))

    def left_by(self, parts: list[bytes] | None) -> Iterator[tuple[list[bytes], int, int]]:
        """Path, mode and time of those that an item does not lie in, deepest first. None: of all."""
        while self._levels:
            length, mode, mtime_ns = self._levels[-1]
            path = self._path[:length]
            if parts is not None and len(parts) > length and parts[:length] == path:
                return
            self._levels.pop()
            yield path, mode, mtime_ns


class TreeWriter:
    """Writes items below `root`. A context manager; its use is one thread at a time.

    Modes (without set-id bits) and times are kept, owners are the caller's. Existing files are replaced, links among them;
    existing directories are used. A file appears when it is whole; one that is not by the end of the block never does. Raises `ProtocolError`, `FileFailure` and, for local trouble such as a full disk, `OSError`.
    """

    def __init__(self, root: Path, max_bytes: int, max_entries: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._entries_left = max_entries
        self._reader = TreeReader()
        self._counter = _Counter()
        self._around = _Around()
        self._file: tuple[ArrivingFile, Entry] | None = None
        self._feeding = threading.Lock()
        self._left = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # A cancelled caller does not wait for the thread that feeds: that one stops before its next item.
        self._left = True
        with self._feeding:
            if self._file is not None:
                self._file[0].drop()
                self._file = None

    def feed(self, data: bytes) -> int:
        """Returns how many bytes of contents were written so far."""
        with self._feeding:
            for item in self._reader.feed(data):
                if self._left:
                    break
                if isinstance(item, bytes):
                    self._piece(item)
                else:
                    self._item(item)
        return self._counter.size

    def finish(self) -> TransferReport:
        self._reader.end()
        self._settle(None)
        return self._counter.report()

    def _settle(self, parts: list[bytes] | None) -> None:
        """Give the directories that an item does not lie in their modes and times: writing into them changes both."""
        for path, mode, mtime_ns in self._around.left_by(parts):
            with self._opened(path) as fd:
                os.fchmod(fd, mode & 0o777)
                os.utime(fd, ns=(mtime_ns, mtime_ns))

    def _item(self, entry: Entry) -> None:
        parts = parts_of(entry.path)
        self._entries_left -= 1
        if self._entries_left < 0:
            raise FileFailure("the tree has more entries than max_entries allows", field="max_entries")
        self._settle(parts)
        if entry.kind == "d":
            self._directory(parts, entry)
        elif entry.kind == "f":
            with self._parent(parts) as (fd, name):
                self._file = (ArrivingFile(fd, name), entry)
            self._counter.files += 1
        elif entry.kind == "l":
            if b"\0" in entry.target:
                raise ProtocolError("the sandbox sent a link with a NUL byte")
            if leads_out(parts, entry.target):
                self._counter.skip(entry.path, "link_out")
                return
            with self._parent(parts) as (fd, name):
                put_link(fd, name, entry.target, entry.mtime_ns)
        else:
            self._counter.skip(entry.path, "unreadable" if entry.kind == "x" else "special")

    def _piece(self, piece: bytes) -> None:
        assert self._file is not None
        file, entry = self._file
        if self._counter.size + len(piece) > self._max_bytes:
            raise FileFailure("the tree holds more bytes than max_bytes allows", field="max_bytes")
        file.write(piece)
        self._counter.size += len(piece)
        if not piece:
            file.finish(entry.mode & 0o777, entry.mtime_ns)
            self._file = None

    def _directory(self, parts: list[bytes], entry: Entry) -> None:
        if parts:
            with self._parent(parts) as (fd, name), contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=fd)
            with self._opened(parts):
                pass  # it is one, and no link
        else:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._around.enter(parts, entry.mode, entry.mtime_ns)

    @contextlib.contextmanager
    def _parent(self, parts: list[bytes]) -> Iterator[tuple[int, bytes]]:
        """An open directory and the name in it."""
        if parts:
            with self._opened(parts[:-1]) as fd:
                yield fd, parts[-1]
            return
        self._root.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd, os.fsencode(self._root.name)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _opened(self, parts: list[bytes]) -> Iterator[int]:
        # The root itself may be reached through links: the caller chose it.
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                below = _enter(fd, part, parts)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)


def _enter(fd: int, part: bytes, parts: list[bytes]) -> int:
    try:
        return os.open(part, _DIRECTORY, dir_fd=fd)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        path = os.fsdecode(b"/".join(parts))
        raise FileFailure(
            f"{path!r} does not lie in a directory of the target: {os.fsdecode(part)!r} is missing or no directory",
            hint="nothing was written through it",
        ) from error
