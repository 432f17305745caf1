"""The log: append-only segments in one directory, written by one thread, read by any.

Life of a record: `stage` encodes it, `write` puts everything staged in the page cache (all or nothing), `sync` makes it
durable. A segment is sealed, and never written again, when it has reached its size. `open` cuts what a crash left
unfinished at the end of the last segment; damage anywhere else is `LogCorrupt`.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec

from barchan.errors import InternalError, LogCorrupt, NodeStorageFull, RecordGone
from barchan.trajectory.members import Members
from barchan.trajectory.record import (
    HEAD_SIZE,
    Place,
    Position,
    Record,
    SegmentHead,
    encode,
)
from barchan.trajectory.segment import SegmentReader

_BEGINNING = Position(0, 0)
_LARGE = 1 << 16
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
Visit = Callable[[Position, Record], None]


class Segment(msgspec.Struct):
    """What is known of one file. `sandboxes` are those with a record in it."""

    number: int
    salt: int
    size: int
    sandboxes: Members = msgspec.field(default_factory=Members)
    known: bool = True
    """False: not read, so that `sandboxes` says nothing."""


class Log:
    """Use as a context manager. Not for two writers: the caller holds the lock of the data directory."""

    def __init__(self, directory: Path, segment_bytes: int, *, fdatasync: Callable[[int], None] = os.fdatasync) -> None:
        self._directory = directory
        self._limit = segment_bytes
        self._fdatasync = fdatasync
        self._segments: dict[int, Segment] = {}
        self._parts: list[bytes | memoryview] = []
        self._size = 0
        """Of the parts together, which are staged."""
        self._staged: set[str] = set()
        self._fd = -1
        self._current: Segment
        self._synced = 0
        self._failed = ""

    @classmethod
    def open(
        cls,
        directory: Path,
        segment_bytes: int,
        *,
        visit: Visit | None = None,
        since: float = 0.0,
        fdatasync: Callable[[int], None] = os.fdatasync,
    ) -> Self:
        """Read the segments, calling `visit` for each record in order, and make the last one ready to append.

        Sealed segments last written before `since` (Unix seconds) are passed over, and count as nobody's.
        `fdatasync` is replaced only by the test that shows that the power-cut test can fail. Raises `LogCorrupt`,
        `NodeStorageFull`.
        """
        log = cls(directory, segment_bytes, fdatasync=fdatasync)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in directory.glob("*.new"):
            leftover.unlink()
        numbers = sorted(int(path.stem) for path in directory.glob("[0-9]*.seg"))
        for number in numbers:
            log._load(number, number == numbers[-1], visit, since)
        if numbers:
            log._resume(numbers[-1])
        else:
            log._start(1)
        return log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing staged is written; what was written is synced. Safe twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                self._fdatasync(fd)
            finally:
                os.close(fd)

    # --- writing

    def stage(self, record: Record) -> Position:
        """Encode a record behind those already staged. A full segment is sealed when the first one is staged."""
        if self.full:
            self._rotate()
        offset = self._current.size + self._size
        parts = encode(record, Place(self._current.salt, offset), self._synced)
        self._parts += parts
        self._size += sum(map(len, parts))
        self._staged.add(record.sandbox)
        return Position(self._current.number, offset)

    @property
    def full(self) -> bool:
        """Whether the next record to be staged seals a segment, which takes syncs."""
        return not self._size and self._current.size >= self._limit

    @property
    def staged(self) -> int:
        """Bytes staged and not written."""
        return self._size

    def write(self) -> None:
        """Hand what is staged to the kernel. After an error none of it is in the log, and nothing is staged."""
        if self._failed:
            self.drop()
            raise InternalError(self._failed)
        start = self._current.size
        try:
            _write_all(self._fd, self._parts, start)
        except OSError as error:
            self._undo(start)
            raise _named(error, "writing the log") from error
        else:
            self._current.size = start + self._size
            for name in self._staged:
                self._current.sandboxes.add(name)
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget what is staged."""
        self._parts.clear()
        self._size = 0
        self._staged.clear()

    def append(self, records: Sequence[Record]) -> list[Position]:
        """Stage and write, all or nothing."""
        try:
            positions = [self.stage(record) for record in records]
        except BaseException:
            self.drop()
            raise
        self.write()
        return positions

    def sync(self) -> None:
        """Make everything written so far durable; another thread may write meanwhile. After a failure the log refuses to go on: what the kernel dropped is unknown."""
        if self._failed:
            raise InternalError(self._failed)
        size = self._current.size
        try:
            self._fdatasync(self._fd)
        except OSError as error:
            self._failed = f"log failed: fdatasync: {error.strerror}; restart the node"
            raise InternalError(self._failed) from error
        self._synced = size

    def _undo(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            self._failed = f"log failed: a partial entry cannot be cut: {error.strerror}; restart the node"

    # --- segments

    def path(self, number: int) -> Path:
        return self._directory / f"{number:010d}.seg"

    def segments(self) -> list[Segment]:
        """In order of their numbers; the last one is still written to. Numbers may have gaps."""
        return list(self._segments.values())

    @property
    def total(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments())

    def retain(self, most: int, live: Collection[str]) -> list[int]:
        """Remove sealed segments, oldest first, until at most `most` bytes are left. Returns their numbers.

        One that holds a record of a live sandbox stays, so the log may remain larger than `most`.
        """
        excess, removed = self.total - most, []
        for segment in self.segments()[:-1]:
            if excess <= 0:
                break
            if not any(name in segment.sandboxes for name in live):
                self.path(segment.number).unlink(missing_ok=True)
                del self._segments[segment.number]
                removed.append(segment.number)
                excess -= segment.size
        if removed:
            self._sync_directory()
        return removed

    def _rotate(self) -> None:
        self.sync()
        self._current.sandboxes.seal()
        old = self._fd
        self._start(self._current.number + 1)
        os.close(old)

    def _start(self, number: int) -> None:
        """Make a new segment durable, with its name, before anything is written to it."""
        head = SegmentHead(number, secrets.randbits(63) | 1)
        fresh = self._directory / f"{number:010d}.new"
        fd = -1
        try:
            fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            _write_all(fd, [head.encode()], 0)
            os.fsync(fd)
            fresh.rename(self.path(number))
            self._sync_directory()
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            fresh.unlink(missing_ok=True)
            self.path(number).unlink(missing_ok=True)
            raise _named(error, "starting a log segment") from error
        self._adopt(fd, Segment(number, head.salt, HEAD_SIZE))

    def _adopt(self, fd: int, segment: Segment) -> None:
        self._fd, self._current, self._synced = fd, segment, segment.size
        self._segments[segment.number] = segment

    def _resume(self, number: int) -> None:
        """What a killed process wrote may not be on disk yet, and is about to be believed: sync it."""
        segment = self._segments[number]
        fd = os.open(self.path(number), os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, segment.size)
            os.fsync(fd)
        except OSError as error:
            os.close(fd)
            raise _named(error, "opening the log") from error
        self._adopt(fd, segment)

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _load(self, number: int, last: bool, visit: Visit | None, since: float) -> None:
        reader = SegmentReader(self.path(number), number)
        segment = Segment(number, reader.head.salt, HEAD_SIZE)
        with reader:
            if not last and self.path(number).stat().st_mtime < since:
                segment.size, segment.known = reader.size, False
                self._segments[number] = segment
                return
            for offset, record in reader.records(HEAD_SIZE, reader.size, torn=last):
                segment.sandboxes.add(record.sandbox)
                if visit:
                    visit(Position(number, offset), record)
            segment.size = reader.at
        if not last:
            segment.sandboxes.seal()
        self._segments[number] = segment

    # --- reading

    def read(self, position: Position) -> Record:
        """The record at a position that `stage` or a record's `previous` gave.

        `RecordGone` when retention removed its segment, `LogCorrupt` if there is none.
        """
        segment = self._segments.get(position.segment)
        if segment is None:
            raise RecordGone(f"segment {position.segment} is not kept any more")
        with SegmentReader(self.path(position.segment), position.segment) as reader:
            for _, record in reader.records(position.offset, reader.size, torn=False):
                return record
        raise LogCorrupt(f"no record at {position.segment}:{position.offset}")

    def scan(self, start: Position = _BEGINNING) -> Iterator[tuple[Position, Record]]:
        """Records from `start` on, as far as they were written when their segment is reached, in order."""
        for segment in self.segments():
            if segment.number < start.segment:
                continue
            first = max(HEAD_SIZE, start.offset if segment.number == start.segment else 0)
            with SegmentReader(self.path(segment.number), segment.number) as reader:
                for offset, record in reader.records(first, segment.size, torn=False):
                    yield Position(segment.number, offset), record

    def scan_of(self, sandbox: str, since: float = 0.0) -> Iterator[tuple[Position, Record]]:
        """Records of one sandbox that are still kept, in order. Searches whole segments: those that hold some.

        Of those passed over by `open` it reads the ones last written at `since` (Unix seconds) or later, each of them once for
        all: afterwards it is known whose records it holds.
        """
        for segment in self.segments():
            path = self.path(segment.number)
            try:
                if sandbox not in segment.sandboxes if segment.known else path.stat().st_mtime < since:
                    continue
                with SegmentReader(path, segment.number) as reader:
                    for offset, record in _records_of(sandbox, segment, reader):
                        yield Position(segment.number, offset), record
            except (RecordGone, FileNotFoundError):
                continue  # removed meanwhile

    def keeps(self, number: int) -> bool:
        """Whether a segment is there."""
        return number in self._segments


def _records_of(sandbox: str, segment: Segment, reader: SegmentReader) -> Iterator[tuple[int, Record]]:
    if segment.known:
        yield from reader.search(sandbox, segment.size)
        return
    seen: set[str] = set()
    yield from reader.records_of(sandbox, segment.size, seen)
    segment.sandboxes, segment.known = Members.sealed(seen), True


def _write_all(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    """Small parts are joined, which costs less than a call for each."""
    for large, some in itertools.groupby(parts, lambda part: len(part) >= _LARGE):
        for piece in some if large else [b"".join(some)]:
            left = memoryview(piece)
            while left:
                done = os.pwrite(fd, left, offset)
                left, offset = left[done:], offset + done


def _named(error: OSError, doing: str) -> NodeStorageFull | InternalError:
    if error.errno in _FULL:
        return NodeStorageFull(f"no space left while {doing}", hint="free space below the data directory")
    return InternalError(f"{doing} failed: {error.strerror}")
