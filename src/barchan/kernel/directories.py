"""Directories whose mode does not depend on the umask of whoever started us."""

from __future__ import annotations

import stat
from pathlib import Path


def private(path: Path) -> None:
    """Make it a directory of mode 0700, also one that exists. Missing parents are made the same, others left alone."""
    make(path, 0o700)
    if stat.S_IMODE(path.stat().st_mode) != 0o700:
        path.chmod(0o700)


def make(path: Path, mode: int) -> None:
    """Make what is missing of a path with exactly this mode; what exists stays as it is."""
    if not path.parent.exists():
        make(path.parent, mode)
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(mode)
