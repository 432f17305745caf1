"""One sandbox's control groups: limits, counters, and ending everything in them.

Functions take the group's directory; `Group` holds what must stay open while the sandbox lives. They work on a
v1 directory, a v2 directory and one that is already gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from barchan.spec import MIB, Limits

_PERIOD = 100_000
"""Of the CPU quota, in µs: what v1 gives every new group."""
_SHORTEST_QUOTA = 1_000
_PAUSE = 0.001


class Counters(msgspec.Struct, frozen=True):
    """What the limits did so far. Both counts only grow while the group lives."""

    oom_kills: int
    pids_max_hits: int
    memory: int
    """Bytes charged at the moment."""


class Consumption(msgspec.Struct, frozen=True):
    """What the processes of a group use, and what they and the ended ones have used."""

    memory: int
    memory_peak: int | None
    """None where the kernel does not say: cgroup v2 before Linux 5.19."""
    cpu_user: float
    cpu_system: float
    pids: int
    """Threads count."""
    processes: int


class Group:
    """Open handles of one sandbox's groups. Closing it leaves the groups as they are."""

    def __init__(
        self, sandbox: str, unified: Path, v1: dict[str, Path], dir_fd: int, tasks_fds: tuple[int, ...]
    ) -> None:
        self.id = sandbox
        self.unified = unified
        self.v1 = v1
        self.dir_fd = dir_fd
        """The cgroup2 directory, for CLONE_INTO_CGROUP."""
        self.tasks_fds = tasks_fds
        """`tasks` of each v1 group, for writing: a thread that moves itself by it waits for no RCU grace period, as
        it would by cgroup.procs (6 to 30 ms)."""
        self._hits_fds: tuple[int, ...] = ()
        """Of what `limit_hits` reads, from its first call on."""

    @classmethod
    def unopened(cls, sandbox: str, unified: Path, v1: dict[str, Path]) -> Group:
        """For asking: without descriptors, and perhaps of a sandbox that is gone."""
        return cls(sandbox, unified, v1, -1, ())

    @classmethod
    def open(cls, sandbox: str, unified: Path, v1: dict[str, Path]) -> Group:
        with contextlib.ExitStack() as undo:
            dir_fd = os.open(unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, dir_fd)
            tasks: list[int] = []
            for path in dict.fromkeys(v1.values()):
                tasks.append(os.open(path / "tasks", os.O_WRONLY | os.O_CLOEXEC))
                undo.callback(os.close, tasks[-1])
            undo.pop_all()
        return cls(sandbox, unified, v1, dir_fd, tuple(tasks))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        fds = (self.dir_fd, *self.tasks_fds) if self.dir_fd >= 0 else ()
        fds += self._hits_fds
        self.dir_fd, self.tasks_fds, self._hits_fds = -1, (), ()
        for fd in fds:
            os.close(fd)

    def kill(self) -> None:
        """SIGKILL to every process, also against a fork race. Does not wait."""
        kill(self.unified)

    def empty(self) -> bool:
        return empty(self.unified)

    def wait_empty(self, timeout: float) -> bool:
        """Whether the last process ended within `timeout` seconds."""
        return wait_empty(self.unified, timeout)

    def pids(self) -> tuple[int, ...]:
        """Host ids of its processes, sub-groups included."""
        return tuple(_pids(self.unified))

    def remove(self, timeout: float = 5.0) -> None:
        """Remove the groups and all sub-groups; idempotent. `TimeoutError` when processes stay."""
        for path in (self.unified, *dict.fromkeys(self.v1.values())):
            remove(path, timeout)

    def consumption(self) -> Consumption:
        """`OSError` ENOENT or ENODEV when the groups are gone. cgroup2 counts CPU time also where v1 has the controller."""
        memory, pids = self.v1.get("memory"), self.v1.get("pids", self.unified)
        peak = _text(memory / "memory.max_usage_in_bytes" if memory else self.unified / "memory.peak")
        current = memory / "memory.usage_in_bytes" if memory else self.unified / "memory.current"
        return Consumption(
            memory=int(current.read_text()),
            memory_peak=int(peak) if peak else None,
            cpu_user=_field(self.unified / "cpu.stat", "user_usec") / 1e6,
            cpu_system=_field(self.unified / "cpu.stat", "system_usec") / 1e6,
            pids=int((pids / "pids.current").read_text()),
            processes=len(self.pids()),
        )

    def throttled(self) -> float:
        """Seconds for which the limit of CPU time kept its processes from running; 0 when the groups are gone."""
        group = self.v1.get("cpu")
        text = _text((group or self.unified) / "cpu.stat").encode()
        return _value(text, b"throttled_time") / 1e9 if group else _value(text, b"throttled_usec") / 1e6

    def unthrottle(self) -> None:
        """Take its limit of CPU time away."""
        if group := self.v1.get("cpu"):
            (group / "cpu.cfs_quota_us").write_text("-1")
        else:
            (self.unified / "cpu.max").write_text("max")

    def limit_hits(self) -> tuple[int, int]:
        """How often a process was killed for memory, and how often one more was refused."""
        # Asked for with each command: opening the files would cost ten times the reading.
        if not self._hits_fds:
            memory = self.v1.get("memory")
            oom = f"{memory}/memory.oom_control" if memory else f"{self.unified}/memory.events"
            self._hits_fds = _opened(f"{self.v1.get('pids', self.unified)}/pids.events", oom)
        pids, *memory_text = (os.pread(fd, 4096, 0) for fd in self._hits_fds)
        return sum(_value(text, b"oom_kill") for text in memory_text), _value(pids, b"max")

    def counters(self) -> Counters:
        memory = self.v1.get("memory")
        oom_kills, pids_max_hits = self.limit_hits()
        return Counters(
            oom_kills=oom_kills,
            pids_max_hits=pids_max_hits,
            memory=int(_text(memory / "memory.usage_in_bytes" if memory else self.unified / "memory.current") or 0),
        )


class Write(NamedTuple):
    """One limit: a file of a group and what is written to it."""

    file: str
    value: str
    optional: bool = False
    """The file is an option of the kernel."""


def limit_writes(controller: str, limits: Limits, *, v1: bool) -> tuple[Write, ...]:
    """What sets the limit of one controller."""
    if controller == "pids":
        return (Write("pids.max", str(limits.pids)),)
    if controller == "cpu":
        quota = max(int(limits.cpus * _PERIOD), _SHORTEST_QUOTA)
        return (Write("cpu.cfs_quota_us", str(quota)) if v1 else Write("cpu.max", f"{quota} {_PERIOD}"),)
    size = str(limits.memory)
    if v1:
        # memsw is memory and swap together.
        memory, both = Write("memory.limit_in_bytes", size), Write("memory.memsw.limit_in_bytes", size, True)
        return (memory, both, Write("memory.kmem.tcp.limit_in_bytes", str(socket_memory(limits)), True))
    return (Write("memory.max", size), Write("memory.swap.max", "0", True))


def set_limit(controller: str, group: Path | str, limits: Limits, *, v1: bool) -> None:
    """Write the limit of one controller."""
    writes = limit_writes(controller, limits, v1=v1)
    for number, write in enumerate(writes):
        try:
            _limit(group, write)
        except OSError as error:
            if error.errno != errno.EINVAL or number + 1 == len(writes):
                raise
            # Of two limits of which one must not be above the other, the old values say which one goes first.
            _limit(group, writes[number + 1])
            _limit(group, write)


def _limit(group: Path | str, write: Write) -> None:
    with contextlib.suppress(*([FileNotFoundError] if write.optional else [])):
        _write(f"{group}/{write.file}", write.value)


def socket_memory(limits: Limits) -> int:
    """Bytes for network socket buffers on v1, which counts them apart from the memory limit. v2 counts them in it."""
    return max(limits.memory // 4, 4 * MIB)


def kill(group: Path) -> None:
    """SIGKILL to all in a group and its sub-groups; a group that is gone is fine."""
    try:
        _write(group / "cgroup.kill", "1")
    except FileNotFoundError:
        _kill_one_by_one(group)


def _kill_one_by_one(group: Path) -> None:
    """For v1, until a pass finds nothing new: a child forked during a pass is met by the next one."""
    seen: set[int] = set()
    while new := set(_pids(group)) - seen:
        seen |= new
        for pid in new:
            _kill_pid(group, pid)


def _kill_pid(group: Path, pid: int) -> None:
    """The pid may be another process's by now: ask for its descriptor first, then whether it is still in the group."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if pid in _pids(group):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)


def empty(group: Path) -> bool:
    """Whether no process is in a group or below it."""
    try:
        return _field(group / "cgroup.events", "populated") == 0
    except FileNotFoundError:
        return not any(True for _ in _pids(group))


def wait_empty(group: Path, timeout: float) -> bool:
    """Woken by the kernel through cgroup.events; v1 has no such file and is polled."""
    end = time.monotonic() + timeout
    try:
        fd = os.open(group / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return _poll_empty(group, end)
    try:
        watch = select.poll()
        watch.register(fd, select.POLLPRI)
        while b"populated 0" not in _pread(fd):
            left = end - time.monotonic()
            if left <= 0:
                return False
            watch.poll(left * 1000)
        return True
    finally:
        os.close(fd)


def _pread(fd: int) -> bytes:
    """A group that was removed has no processes."""
    try:
        return os.pread(fd, 4096, 0)
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        return b"populated 0"


def _poll_empty(group: Path, end: float) -> bool:
    while not empty(group):
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def end(group: Path, timeout: float) -> None:
    """Kill, wait, remove. Idempotent. A group that is empty already is only removed."""
    if not _removed(group):
        kill(group)
        wait_empty(group, timeout)
        remove(group, timeout)


def remove(group: Path, timeout: float) -> None:
    """Remove a group and its sub-groups, deepest first. `TimeoutError` when processes stay.

    An exiting process counts for a moment after it left cgroup.procs (v1), so what is busy is tried again.
    """
    if _removed(group):
        return
    limit = time.monotonic() + timeout
    for path in _deepest_first(group):
        while not _removed(path):
            if time.monotonic() > limit:
                raise TimeoutError(errno.ETIMEDOUT, f"{path} still holds processes or groups")
            time.sleep(_PAUSE)


def _removed(path: Path) -> bool:
    """False when it is busy: with processes, or with groups below it."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _deepest_first(group: Path) -> list[Path]:
    return [Path(root) for root, _, _ in os.walk(group, topdown=False)]


def _pids(group: Path) -> Iterator[int]:
    for root, _, _ in os.walk(group):
        for line in _text(Path(root) / "cgroup.procs").split():
            yield int(line)


def _text(path: Path) -> str:
    """A group can vanish between any two calls (ENOENT), also while its file is open (ENODEV)."""
    try:
        return path.read_text()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        return ""


def _field(path: Path, name: str) -> int:
    return _value(path.read_bytes(), name.encode())


def _value(text: bytes, name: bytes) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    return 0


def _opened(needed: str, optional: str) -> tuple[int, ...]:
    """For reading."""
    fd = os.open(needed, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return (fd, os.open(optional, os.O_RDONLY | os.O_CLOEXEC))
    except FileNotFoundError:
        return (fd,)
    except OSError:
        os.close(fd)
        raise


def _write(path: Path | str, value: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
