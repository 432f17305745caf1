"""Bytes that went to a disk, so that nothing else on the host counts."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

SECTOR = 512


def device_of(file: Path) -> Path:
    """The loop device over a file, below /sys/block."""
    for found in Path("/sys/block").glob("loop*/loop/backing_file"):
        if found.read_text().strip() == str(file):
            return found.parent.parent
    raise FileNotFoundError(f"no loop device over {file}")


def to_device(device: Path) -> int:
    """Everything that was written to a block device since it was made, once what waits in memory is written too."""
    os.sync()
    return int((device / "stat").read_text().split()[6]) * SECTOR


def by_processes(pids: Iterable[int]) -> int:
    """What running processes wrote, counted when it reached the page cache."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/io").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def by_children() -> int:
    """As `by_processes`, of all children that this process has waited for, and of theirs."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock * SECTOR
