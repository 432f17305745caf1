"""Looking from the host at what tests do to a server: memory of its processes, processes of a sandbox."""

from __future__ import annotations

import json
import os
import re
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from barchan import Sandbox
from tests.server import Server

MIB = 1 << 20


@contextmanager
def flat_memory(server: Server, *sandboxes: Sandbox, most: int = 64 * MIB) -> Iterator[None]:
    """Fails when client, API, node agent or the first process of a sandbox needs `most` bytes more than before, at any moment."""
    state = json.loads((server.data / "run/up.json").read_text())
    services = {name: int(service["pid"]) for name, service in state["services"].items()}
    watched = {"client": os.getpid(), **services, **{box.id: box.info.pid for box in sandboxes}}
    for pid in watched.values():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is what it has now
    before = {name: _peak(pid) for name, pid in watched.items()}
    yield
    grown = {name: _peak(pid) - before[name] for name, pid in watched.items()}
    assert max(grown.values()) <= most, {name: f"{size >> 20} MiB" for name, size in grown.items()}


def _peak(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def members(sandbox: Sandbox) -> list[int]:
    """Pid file descriptors of all its processes, by the pid namespace that they share with the first one."""
    wanted = os.stat(f"/proc/{sandbox.info.pid}/ns/pid").st_ino
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}/ns/pid").st_ino == wanted:
                found.append(os.pidfd_open(int(name)))
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or none of ours
            continue
    return found


def all_gone(pidfds: list[int], seconds: float = 10) -> bool:
    """Whether all of them end in that time. Closes them."""
    ended = []
    for fd in pidfds:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        ended.append(bool(poll.poll(seconds * 1000)))
        os.close(fd)
    return all(ended)
