"""Our own terminal: its size, and that it is what it was afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator

import pytest

from barchan.cli.terminal import raw, size_of
from barchan.spec import Terminal


@pytest.fixture
def terminal() -> Iterator[int]:
    master, slave = pty.openpty()
    yield slave
    os.close(master)
    os.close(slave)


def test_its_size(terminal: int) -> None:
    assert size_of(terminal) is None, "a size of nothing is none"
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    assert size_of(terminal) == Terminal(rows=40, columns=120)
    with open(os.devnull) as no_terminal:
        assert size_of(no_terminal.fileno()) is None


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_it_is_restored_whatever_happens(terminal: int, error: type[BaseException] | None) -> None:
    before = termios.tcgetattr(terminal)
    with contextlib.nullcontext() if error is None else pytest.raises(error), raw(terminal):
        assert not termios.tcgetattr(terminal)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)
        if error is not None:
            raise error
    assert termios.tcgetattr(terminal) == before


def test_one_that_is_gone_is_no_error() -> None:
    master, slave = pty.openpty()
    with raw(slave):
        os.close(master)
        os.close(slave)
