"""Directories for work in progress, which may be of processes that are gone, on this host or another."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from barchan.errors import NodeStorageFull

ABANDONED = 86400.0
"""Seconds after which the work of a process on another host counts as left behind."""


@contextmanager
def temporary(where: Path) -> Iterator[Path]:
    """A fresh directory below `where`, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix=f"{_here()}-{os.getpid()}-", dir=where))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@functools.cache
def _here() -> str:
    """This boot of this host, and these process ids."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8] + str(os.stat("/proc/self/ns/pid").st_ino)


def abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether the process that made this one is gone, as far as can be told."""
    where, _, rest = entry.name.partition("-")
    owner = rest.partition("-")[0]
    if where == _here():
        return not (owner.isdigit() and Path("/proc", owner).exists())
    try:
        return time.time() - entry.stat().st_mtime > ABANDONED
    except FileNotFoundError:
        return False


@contextmanager
def roomy(root: Path) -> Iterator[None]:
    """A full disk is told as ours."""
    try:
        yield
    except OSError as error:  # also the one of several files that copying raises
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise NodeStorageFull(
                f"no room for the layer at {root}", hint="free space there", phase="convert"
            ) from error
        raise
