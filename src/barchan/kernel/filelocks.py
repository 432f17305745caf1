"""File locks: memory that the kernel charges to no control group, and who holds them.

A lock (fcntl, flock) takes some 200 bytes of the kernel's memory. A process may hold any number on one open file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

CACHE = Path("/sys/kernel/slab/file_lock_cache")
LINE = 128
"""Bytes of a line that tells of a lock, at most."""


class LockMeter:
    """What all locks of the host take. Asked some times per second: the file stays open."""

    def __init__(self, cache: Path = CACHE) -> None:
        """`OSError` where the kernel does not say (no CONFIG_SLUB_DEBUG)."""
        self._each = int((cache / "slab_size").read_text())
        self._fd = os.open(cache / "total_objects", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def size(self) -> int:
        """Bytes. Of equally large objects too, where the kernel keeps several kinds in one cache."""
        return int(os.pread(self._fd, 4096, 0).split()[0]) * self._each


def held(pids: Iterable[int], enough: int) -> int:
    """How many locks these processes hold, by their open files. Counts on to somewhat above `enough` at most.

    Not by /proc/locks: there a lock whose taker has ended is not shown, one of an open file has no owner, and reading
    takes the square of their number while every lock of the host waits. What is only mapped or on its way through a
    socket is not found.
    """
    found: set[bytes] = set()
    for path in _open_files(pids):
        with contextlib.suppress(OSError):
            found.update(locks_in(_read(path, LINE * enough)))
        if len(found) > enough:
            break
    return len(found)


def _open_files(pids: Iterable[int]) -> Iterator[str]:
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended
            yield from (f"/proc/{pid}/fdinfo/{name}" for name in os.listdir(f"/proc/{pid}/fdinfo"))


def _read(path: str, most: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        text = bytearray()
        while len(text) < most and (piece := file.read(most - len(text))):
            text += piece
    return bytes(text)


def locks_in(text: bytes) -> Iterable[bytes]:
    """Of one fdinfo file, without the number that counts the lines: kind, holder, file, range. The same for each
    descriptor that shares an open file."""
    return (line.partition(b": ")[2] for line in text.split(b"lock:")[1:])
