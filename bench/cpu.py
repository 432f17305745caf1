"""Who used the CPU while something ran: processes by name, and the rest of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Used:
    """Microseconds so far, by name; `everything` is the whole machine."""

    us: Mapping[str, float]

    def since(self, before: Used, cycles: int) -> dict[str, float]:
        """Per cycle. `rest` is the kernel's threads, and whatever else runs on this machine."""
        each = {name: (value - before.us.get(name, 0.0)) / cycles for name, value in self.us.items()}
        everything = each.pop("everything")
        return {**each, "rest": everything - sum(each.values())}


def used(processes: Mapping[str, int], groups: Mapping[str, Path] | None = None) -> Used:
    """Of processes by id and of cgroup v2 directories, which count also what has ended in them."""
    of_groups = {name: group(path) for name, path in (groups or {}).items()}
    return Used({**{name: process(pid) for name, pid in processes.items()}, **of_groups, "everything": everything()})


def group(path: Path) -> float:
    fields = (path / "cpu.stat").read_text().split()
    return float(fields[fields.index("usage_usec") + 1])


def process(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_US


def everything() -> float:
    """All but idle, waiting for disks, and what the hypervisor took."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) * TICK_US


def children(pid: int, name: str) -> dict[str, int]:
    """Children of a process with this name: `{name: pid}`, empty or one."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == name:
                return {name: int(child)}
    return {}
