"""Directories whose mode does not depend on the umask of whoever started us."""

from __future__ import annotations

import os
from pathlib import Path


def private(path: Path | str) -> None:
    """Make it a directory of mode 0700, also one that exists. Missing parents are made the same, others left alone."""
    try:
        os.mkdir(path, 0o700)
    except (FileExistsError, FileNotFoundError):
        make(Path(path), 0o700)
    os.chmod(path, 0o700)


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
