"""What a sandbox uses, as its node measured it."""

from __future__ import annotations

import msgspec

from barchan.spec import SandboxId


class SandboxStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox uses and has used, with all its processes."""

    id: SandboxId
    since: float
    """When it was made: what adds up is counted from here. Unix seconds, as `at`, the time of measuring."""
    at: float
    memory: int
    """Bytes charged at the moment, page cache of its files included."""
    memory_peak: int | None
    """The most of it so far; None where the kernel does not say (cgroup v2 before Linux 5.19)."""
    cpu_user: float
    """Seconds of CPU time, of ended processes too."""
    cpu_system: float
    pids: int
    processes: int
    """The sandbox's first one included."""
    disk: int
    """Bytes written that are still there, as of the file system's last commit (up to 30 s ago)."""
    oom_kills: int = 0
    pids_hits: int = 0
