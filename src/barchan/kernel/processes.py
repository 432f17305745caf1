"""Facts about processes and the host, read from /proc."""

from __future__ import annotations

import contextlib
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


FILE_MAX = Path("/proc/sys/fs/file-max")
FILES_UNBOUNDED = (1 << 63) - 1
"""What systemd sets at boot. An open file is charged to its sandbox's memory, so the host needs no other bound."""


def files_free() -> int:
    """Files that the host may still have open, whoever opens them."""
    open_, _, most = Path("/proc/sys/fs/file-nr").read_text().split()
    return int(most) - int(open_)


def unbind_files(setting: Path = FILE_MAX) -> int:
    """Raise the host's limit of open files as far as it goes; what it is then. It stays when it is not ours to change."""
    with contextlib.suppress(OSError):
        if int(setting.read_text()) < FILES_UNBOUNDED:
            setting.write_text(str(FILES_UNBOUNDED))
    return int(setting.read_text())


@functools.cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int:
    """Clock ticks since boot when the process began; 0 when there is no such process or only its zombie."""
    fields = _stat(pid)
    return 0 if not fields or fields[0] == b"Z" else int(fields[19])


def state(pid: int) -> str:
    """One letter, as in proc(5): R runs or waits for a processor. Empty when there is no such process."""
    fields = _stat(pid)
    return fields[0].decode() if fields else ""


def pid_of(pidfd: int) -> int:
    """-1 when the process was waited for."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines())
    return int(fields["Pid"])


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
