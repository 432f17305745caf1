"""Reading one segment of the log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from barchan.errors import LogCorrupt, RecordGone
from barchan.trajectory.record import (
    ENTRY,
    HEAD_SIZE,
    Place,
    Record,
    beginning,
    decode,
    decode_head,
    entry_length,
    entry_sound,
    newest_sync_mark,
    owner,
)

_SEARCHED = 4 << 20


class SegmentReader:
    """Reads entries of one file by ordinary reads: a mapping would turn a disk error into a signal."""

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        try:
            self._file = path.open("rb", buffering=1 << 16)
        except FileNotFoundError as error:
            raise RecordGone(f"{path.name} is not kept any more") from error
        self.size = os.fstat(self._file.fileno()).st_size
        self.at = HEAD_SIZE
        try:
            self.head = decode_head(self._file.read(HEAD_SIZE))
            if self.head.number != number:
                raise LogCorrupt(f"segment says it is number {self.head.number}")
        except LogCorrupt as error:
            self._file.close()
            raise self._corrupt(0, error.message) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def records(self, start: int, end: int, *, torn: bool) -> Iterator[tuple[int, Record]]:
        """Whole records between two offsets; `at` is where the next would begin.

        A bad entry is `LogCorrupt`, except, with `torn`, when nothing shows that it had ever been synced.
        """
        for offset, payload in self._payloads(start, end, torn=torn):
            try:
                record = decode(payload)
            except LogCorrupt as error:
                raise self._corrupt(offset, error.message) from error
            yield offset, record

    def records_of(self, sandbox: str, end: int, seen: set[str]) -> Iterator[tuple[int, Record]]:
        """Those of one sandbox up to `end`. Whose the others are is added to `seen`; they are not decoded further."""
        for offset, payload in self._payloads(HEAD_SIZE, end, torn=False):
            try:
                seen.add(name := owner(payload))
                if name == sandbox:
                    yield offset, decode(payload)
            except LogCorrupt as error:
                raise self._corrupt(offset, error.message) from error

    def search(self, sandbox: str, end: int) -> Iterator[tuple[int, Record]]:
        """As `records_of`, by looking for the name, which costs a hundredth. A damaged record is passed over.

        The name may stand anywhere in an output; the check value of an entry's head may not.
        """
        wanted, fd, at = beginning(sandbox), self._file.fileno(), HEAD_SIZE
        while len(some := os.pread(fd, min(_SEARCHED, end - at), at)) >= len(wanted):
            found = some.find(wanted)
            while found >= 0:
                yield from self._record_at(fd, at + found - ENTRY.size, end)
                found = some.find(wanted, found + 1)
            at += len(some) - len(wanted) + 1

    def _record_at(self, fd: int, offset: int, end: int) -> Iterator[tuple[int, Record]]:
        """The record there, if one begins there."""
        place = Place(self.head.salt, offset)
        head = os.pread(fd, ENTRY.size, offset)
        length = entry_length(head, place)
        if length is not None and offset + ENTRY.size + length <= end:
            payload = os.pread(fd, length, offset + ENTRY.size)
            if len(payload) == length and entry_sound(head, payload, place):
                yield offset, decode(payload)

    def _payloads(self, start: int, end: int, *, torn: bool) -> Iterator[tuple[int, bytes]]:
        self.at = start
        self._file.seek(start)
        while self.at < end:
            payload = self._entry(end)
            if payload is None:
                if torn and not self._was_synced():
                    return
                raise self._corrupt(self.at, "entry is damaged")
            offset, self.at = self.at, self.at + ENTRY.size + len(payload)
            yield offset, payload

    def _entry(self, end: int) -> bytes | None:
        head = self._file.read(ENTRY.size)
        if len(head) < ENTRY.size:
            return None
        place = Place(self.head.salt, self.at)
        length = entry_length(head, place)
        if length is None or length > end - self.at - ENTRY.size:
            return None
        payload = self._file.read(length)
        return payload if len(payload) == length and entry_sound(head, payload, place) else None

    def _was_synced(self) -> bool:
        """Whether a later entry states that the place where reading stopped had been on disk before."""
        self._file.seek(self.at)
        return newest_sync_mark(self._file.read(), Place(self.head.salt, self.at)) > self.at

    def _corrupt(self, offset: int, why: str) -> LogCorrupt:
        return LogCorrupt(
            f"{self._path.name} at {offset}: {why}",
            hint="move the segment elsewhere to start without its records, or restore it from its shipped copy",
        )
