"""A server of its own for a bench, and what can be read about its processes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from barchan import Client, Limits, Sandbox

MIB, GIB = 1 << 20, 1 << 30
DISK = Path(os.environ.get("BARCHAN_BENCH_DISK", "/var/tmp"))
SMALL = Limits(memory=64 * MIB, pids=64, disk=16 * MIB)


@dataclass(frozen=True)
class Options:
    json: bool
    n: int


def options(n: int) -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for programs")
    parser.add_argument("-n", type=int, default=n, help=f"rounds [{n}]")
    given = parser.parse_args()
    return Options(given.json, given.n)


@dataclass(frozen=True)
class Rig:
    """A running server with the environment `tiny` in it."""

    work: Path
    data: Path
    rootfs: Path

    def pids(self) -> dict[str, int]:
        """Of the server's processes, by service."""
        services = json.loads((self.data / "run/up.json").read_text())["services"]
        return {name: reference["pid"] for name, reference in services.items()}


def create(client: Client) -> Awaitable[Sandbox]:
    """What every bench measures: a small sandbox of the tiny environment."""
    return client.create("tiny", limits=SMALL)


@contextlib.contextmanager
def rig(
    scratch: str = "4g",
    max_sandboxes: int = 1000,
    prepare: Callable[[Path], None] = lambda data: None,
    settings: Sequence[str] = (),
) -> Iterator[Rig]:
    """Start a server in a new directory on a real disk; stop it and remove everything at the end.

    `prepare` is called with the data directory before the server starts; `settings` are more options of `barchan up`.
    """
    work = DISK / f"barchan-bench-{os.getpid()}"
    rootfs = make_tiny(work / "rootfs")
    data = work / "data"
    try:
        barchan(data, "env", "import", "tiny", str(rootfs))
        prepare(data)
        sizes = ("--scratch-bytes", scratch, "--max-sandboxes", str(max_sandboxes))
        barchan(data, "up", "-d", "--name", "bench", *sizes, *settings)
        yield Rig(work, data, rootfs)
    finally:
        if (data / "run").is_dir():
            barchan(data, "down")
        shutil.rmtree(work, ignore_errors=True)


def barchan(data: Path, *argv: str) -> None:
    command = [sys.executable, "-m", "barchan.cli.main", *argv, "--data", str(data)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def make_tiny(root: Path) -> Path:
    """The same root file system for us and for the peers: a static busybox."""
    for name in ("bin", "etc", "tmp", "root", "proc", "sys", "dev"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    for applet in ("sh", "true", "sleep", "cat", "dd", "yes", "mkdir", "rm"):
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    return root


def cpu_us(pid: int) -> float:
    """User and system time of a process and its threads so far, microseconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK")


def rss(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def pss(pid: int) -> int:
    """Resident bytes, shared pages divided by their users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def machine() -> str:
    """One line about where the figures come from."""
    load = os.getloadavg()[0]
    return f"kernel {os.uname().release}, {os.cpu_count()} CPUs, load {load:.1f} at the end, Python {sys.version.split()[0]}"
