"""Facts about processes and the host, read from /proc."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    total: int
    available: int
    """Bytes."""


def memory() -> Memory:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return Memory(*(int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable")))


def pids_free() -> int:
    """Process ids left on the host. The tasks there are stand after the slash in loadavg's fourth field."""
    tasks = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    return int(Path("/proc/sys/kernel/pid_max").read_text()) - tasks


@functools.cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int:
    """Clock ticks since boot when the process began; 0 when there is no such process or only its zombie."""
    fields = _stat(pid)
    return 0 if not fields or fields[0] == b"Z" else int(fields[19])


def cpu_ticks(pid: int) -> int:
    """Clock ticks of CPU time it has used; 0 when there is no such process."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the state on; the name before them may hold anything."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        stat = os.read(fd, 4096)
    except ProcessLookupError:
        return []
    finally:
        os.close(fd)
    return stat[stat.rindex(b")") + 2 :].split()
