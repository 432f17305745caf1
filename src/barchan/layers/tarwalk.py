"""Members of a tar that a stranger wrote, one at a time, with bounded memory and without being fooled.

The standard library's reader takes a damaged header in the middle for the end of the archive, reads headers of any
size into memory, can be sent backwards by a negative size, and loops over a sparse map that overlaps. All of these are
refused here.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import IO, Any

from barchan.errors import InvalidRequest, NodeStorageFull

MOST_ENTRIES = 2_000_000
MOST_HEADER = 4 << 20
"""Bytes of one header, its long names and attributes included."""
MOST_NAME = 4095
"""What the kernel takes as a path."""
MOST_DEPTH = 400
"""Directories one in another. What removes a tree goes as deep as the tree, with a descriptor for each."""
NODE_BYTES = 4096
"""Estimate of what one entry takes on disk beside its content."""
_BLOCK = tarfile.BLOCKSIZE
_PIECE = 64 << 20
_XATTR = "SCHILY.xattr."
_LATEST = 1 << 62
_UNREADABLE = (tarfile.TarError, EOFError, ValueError, OverflowError, IndexError, RecursionError)


class _Bounded:
    """A file whose reads are of a sane size: what tarfile reads whole are headers."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell, self.close = file.seek, file.tell, file.close

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MOST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


class Tar:
    """An open, uncompressed tar. Errors are `InvalidRequest` with `phase`."""

    def __init__(self, file: IO[bytes], shown: str, phase: str) -> None:
        self._file = file
        self._shown, self._phase = shown, phase

    def members(self) -> Iterator[tarfile.TarInfo]:
        """In the order of the archive; its end is checked."""
        bounded: Any = _Bounded(self._file)
        try:
            tar: Any = tarfile.open(fileobj=bounded, mode="r:", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
        except _UNREADABLE as error:
            if not os.fstat(self._file.fileno()).st_size:
                return
            raise self.unreadable(error) from error
        at = 0
        while (member := self._next(tar)) is not None:
            if tar.offset <= at or member.size < 0:
                raise self.unreadable("a header with a negative size")
            at = tar.offset
            tar.members.clear()  # tarfile keeps all of them
            yield member
            if self._ends_with(member, tar.offset):
                return
        self._check_end(at)

    def _next(self, tar: Any) -> tarfile.TarInfo | None:
        try:
            found: tarfile.TarInfo | None = tar.next()
            return found
        except _UNREADABLE as error:
            raise self.unreadable(error) from error

    def _ends_with(self, member: tarfile.TarInfo, at: int) -> bool:
        """Whether the archive ends exactly behind this content, without what should fill up its block until `at`.

        umoci writes such. An end within what fills it up is no writer's, but a cut.
        """
        size = os.fstat(self._file.fileno()).st_size
        return member.offset_data + sum(length for _, length in self._pieces(member)) == size < at

    def _check_end(self, at: int) -> None:
        """tarfile stops in silence at a damaged or cut header; `at`: where that of the next member would begin."""
        block = os.pread(self._file.fileno(), _BLOCK, at)
        if block and block != bytes(_BLOCK):
            raise self.unreadable(f"the header at byte {at} is damaged or cut short")

    def copy(self, member: tarfile.TarInfo, out: int) -> None:
        """Write the content of a regular member into the empty file `out`; holes of sparse ones stay holes."""
        at = member.offset_data
        for offset, length in self._pieces(member):
            self._copy_piece(member, at, out, offset, length)
            at += length
        os.ftruncate(out, member.size)

    def _copy_piece(self, member: tarfile.TarInfo, at: int, out: int, offset: int, length: int) -> None:
        while length:
            done = os.copy_file_range(self._file.fileno(), out, min(length, _PIECE), at, offset)
            if not done:
                raise self.unreadable(f"the content of {member.name!r} is cut short")
            at, offset, length = at + done, offset + done, length - done

    def _pieces(self, member: tarfile.TarInfo) -> list[tuple[int, int]]:
        """(offset, length) of each run of data."""
        sparse: Any = member.sparse
        if sparse is None:
            return [(0, member.size)]
        end = 0
        for offset, length in sparse:
            if offset < end or length < 0 or offset + length > member.size:
                raise self.unreadable(f"the sparse map of {member.name!r} makes no sense")
            end = offset + length
        return list(sparse)

    def unreadable(self, why: object) -> InvalidRequest:
        return InvalidRequest(f"{self._shown} is not a readable tar: {why}", field="source", phase=self._phase)


@contextmanager
def opened(path: Path, shown: str, phase: str) -> Iterator[Tar]:
    with path.open("rb") as file:
        yield Tar(file, shown, phase)


class Budget:
    """How many entries and bytes an archive may still make. `room` in bytes."""

    def __init__(self, room: int, phase: str) -> None:
        self._room, self._phase, self._entries = room, phase, 0

    def take(self, shown: str, size: int) -> None:
        self._entries += 1
        self._room -= NODE_BYTES + size
        if self._entries > MOST_ENTRIES:
            raise InvalidRequest(
                f"tar member {shown!r} is beyond the limit of {MOST_ENTRIES} members", field="source", phase=self._phase
            )
        if self._room < 0:
            raise NodeStorageFull(
                f"the tar does not fit on the disk of the layer store (at member {shown!r})",
                hint="free disk space or import less",
                phase=self._phase,
                field="source",
            )


def attributes_of(member: tarfile.TarInfo) -> dict[str, bytes]:
    """Extended attributes by name, nothing refused yet. An empty record means none, as everywhere in this format."""
    found = ((key, value) for key, value in member.pax_headers.items() if key.startswith(_XATTR) and value)
    return {key.removeprefix(_XATTR): value.encode("utf-8", "surrogateescape") for key, value in found}


def time_of(member: tarfile.TarInfo) -> int:
    """Modification time in ns; `ValueError` for one that is no number. Times before 1970 become 1970."""
    try:
        exact = Decimal(member.pax_headers.get("mtime") or member.mtime)
        moment = int(exact * 10**9) if exact.is_finite() else -1
    except DecimalException as error:
        raise ValueError("is no time") from error
    if moment >= _LATEST or not exact.is_finite():
        raise ValueError("is no time")
    return max(0, moment)
