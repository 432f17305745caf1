"""Our own standard streams: an output that cannot be written is an error with a name, not a traceback.

`BrokenPipeError` stays what it is: nobody reads, and that is no error.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from barchan.errors import FileFailure

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

NAMES = ("stdin", "stdout", "stderr")


def failure(fd: int, error: OSError) -> FileFailure:
    """An error of one of the standard streams, in our tree."""
    name = NAMES[fd] if fd < len(NAMES) else f"descriptor {fd}"
    return FileFailure(f"{name}: {error.strerror}")


class _Named(io.FileIO):
    """A standard output whose errors say which one it is."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise failure(self.fileno(), error) from error


def claim() -> None:
    """Make `sys.stdout` and `sys.stderr` name their errors. For programs that own the process."""
    for fd in range(len(NAMES)):
        _occupy(fd)
    sys.stdout = _text(1, sys.stdout)
    sys.stderr = _text(2, sys.stderr)


def _occupy(fd: int) -> None:
    """A descriptor that is closed would be given to the next socket, which would then get our output."""
    try:
        os.fstat(fd)
    except OSError:
        os.open(os.devnull, os.O_RDWR)


def _text(fd: int, before: TextIO | None) -> io.TextIOWrapper:
    encoding, errors = (before.encoding, before.errors) if before else ("utf-8", "backslashreplace")
    lines = fd == 2 or os.isatty(fd)
    return io.TextIOWrapper(io.BufferedWriter(_Named(fd)), encoding=encoding, errors=errors, line_buffering=lines)


def settle() -> None:
    """Write what is left, or drop it: Python would try again at its end, and complain."""
    for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, FileFailure):
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
