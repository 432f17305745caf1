"""Network namespaces of other processes, and work done in one by the calling thread alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from barchan.kernel import syscalls

CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"
_libc = ctypes.CDLL(None, use_errno=True)


def enter(fd: int) -> None:
    """The calling thread goes to the network namespace `fd`, or to that of the process with the pidfd `fd`."""
    if _libc.setns(ctypes.c_int(fd), ctypes.c_int(CLONE_NEWNET)):
        raise syscalls.oserror("setns to a network namespace")


@contextlib.contextmanager
def entered(fd: int) -> Iterator[None]:
    """As `enter`, and back at the end. No `await` inside: other tasks of the thread would run in that namespace."""
    home = own()
    try:
        enter(fd)
        try:
            yield
        finally:
            enter(home)
    finally:
        os.close(home)


def own() -> int:
    """The calling thread's network namespace; the caller closes it. While it is open the namespace cannot end."""
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def new() -> int:
    """As `own`, of a namespace that nobody is in: everything in it goes when the caller closes it."""
    home = own()
    try:
        if _libc.unshare(ctypes.c_int(CLONE_NEWNET)):
            raise syscalls.oserror("unshare of the network namespace")
        return own()
    finally:
        enter(home)
        os.close(home)


def of_process(pidfd: int) -> int:
    """As `own`, of a process. By its pidfd: its number may be another's already. `ProcessLookupError` when it ended."""
    with entered(pidfd):
        return own()
