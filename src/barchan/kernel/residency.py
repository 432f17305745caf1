"""Which parts of a file are in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from itertools import groupby

from barchan.kernel.syscalls import oserror

Range = tuple[int, int]
"""Offset and length, bytes."""

_PAGE = mmap.PAGESIZE
_WINDOW = 1 << 30
"""Mapped at once: the kernel writes one byte a page."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_FAILED = ctypes.c_void_p(-1).value
_LOW_BITS = bytes(value & 1 for value in range(256))


def resident(fd: int, size: int) -> tuple[Range, ...]:
    """What of the first `size` bytes of an open file is in memory: sorted, apart, in whole pages but for the end of the file.

    Reads nothing. Pages count whoever brought them in, read-ahead too; what memory did not keep is not seen.
    """
    pages = (page for at in range(0, size, _WINDOW) for page in _pages(fd, at, min(_WINDOW, size - at)))
    return tuple(_joined(pages, size))


def _pages(fd: int, offset: int, length: int) -> bytes:
    """One byte a page: whether it is there."""
    # Not Python's own mmap: it does not tell where it mapped a read-only file.
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _FAILED:
        raise oserror("mmap")
    found = ctypes.create_string_buffer((length + _PAGE - 1) // _PAGE)
    try:
        if _libc.mincore(address, length, found):
            raise oserror("mincore")
    finally:
        _libc.munmap(address, length)
    return found.raw.translate(_LOW_BITS)


def _joined(pages: Iterator[int], size: int) -> Iterator[Range]:
    at = 0
    for there, run in groupby(pages):
        length = sum(1 for _ in run) * _PAGE
        if there:
            yield at, min(length, size - at)
        at += length


def forget(fd: int) -> None:
    """Let go of a file's pages, as far as no one has them mapped or is writing them."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def fetch(fd: int, ranges: tuple[Range, ...]) -> None:
    """Start reading ranges of a file into memory; does not wait for all of it."""
    for offset, length in ranges:
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
