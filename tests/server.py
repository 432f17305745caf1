"""One server for the whole test run, started by whichever worker needs it first, ended when the run ends.

It runs as real processes, as a user would start it, in a data directory on a real disk: EROFS images cannot be mounted
from overlayfs or tmpfs. Workers find each other through the environment and a lock file.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PLACE = "BARCHAN_TEST_DATA"
ENOUGH = 4 << 30
SCRATCH = "1g"
_NAME = "barchan-test-"


@dataclass(frozen=True)
class Server:
    """A running `barchan up` and the commands that work on it."""

    data: Path

    @property
    def shared(self) -> Path:
        """The directory that sandboxes may mount as `shared`."""
        return self.data.with_name(f"{self.data.name}-shared")

    def command(self, *argv: str) -> list[str]:
        return [sys.executable, "-m", "barchan.cli.main", *argv, "--data", str(self.data)]

    def run(self, *argv: str, timeout: float = 60) -> Any:
        """Run one `barchan` command to its end. Returns what it printed as JSON, one value or a list of lines."""
        done = subprocess.run(
            self.command(*argv, "--json"), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"barchan {' '.join(argv)}: {done.returncode}\n{done.stderr.decode()}{self.log()}"
        values = [json.loads(line) for line in done.stdout.splitlines()]
        return values[0] if len(values) == 1 else values

    def log(self) -> str:
        """The end of the server's own log."""
        path = self.data / "run/up.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""


def choose_place() -> None:
    """Called once per run, before there are workers: name the data directory and clean up after killed runs."""
    for base in disks():
        for old in base.glob(f"{_NAME}*"):
            if (pid := re.fullmatch(rf"{_NAME}(\d+)(-\w+)?", old.name)) and not Path("/proc", pid[1]).exists():
                remove(old)
    place = next((base for base in disks() if shutil.disk_usage(base).free > ENOUGH), None)
    if place is not None:
        os.environ[PLACE] = str(place / f"{_NAME}{os.getpid()}")


def end() -> None:
    if place := os.environ.pop(PLACE, None):
        remove(Path(place))
        shutil.rmtree(Server(Path(place)).shared, ignore_errors=True)


@contextmanager
def own_server(name: str, *options: str, data: Path | None = None) -> Iterator[Server]:
    """A server of a test's own, with no environment yet."""
    shared_server()
    server = Server(data or Path(f"{os.environ[PLACE]}-{name}"))
    try:
        server.run("up", "-d", "--name", name, "--scratch-bytes", "256m", *options)
        yield server
    finally:
        remove(server.data)


def remove(data: Path) -> None:
    """End a server and delete its directory, unless something is still mounted there: then nothing is deleted."""
    if (data / "run").is_dir():
        Server(data).run("down", timeout=180)
    if f"{data}/" not in Path("/proc/self/mountinfo").read_text():
        shutil.rmtree(data, ignore_errors=True)
    data.with_suffix(".lock").unlink(missing_ok=True)


def disks() -> list[Path]:
    """Directories for large temporary files whose file system can hold images that are mounted directly."""
    bases = [Path("/var/tmp"), Path("/var/lib"), Path("/mnt")]
    return [base for base in bases if base.is_dir() and filesystem_of(base) not in ("overlay", "tmpfs", "ramfs")]


def filesystem_of(path: Path) -> str:
    """Type of the mount that holds an existing directory."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return next((right.split()[0] for left, right in mounts if left.split()[2] == wanted), "")


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def shared_server() -> Server:
    """The run's server, started if it is not there. Skips where no disk can hold it."""
    place = os.environ.get(PLACE)
    if os.geteuid() != 0:
        pytest.skip("needs root: makes namespaces, mounts and cgroups")
    if place is None:
        pytest.skip(f"no disk with {ENOUGH >> 30} GiB free that is neither overlayfs nor tmpfs")
    server = Server(Path(place))
    with exclusive(server.data.with_suffix(".lock")):
        if not (server.data / "run" / "api.sock").exists():
            server.shared.mkdir(mode=0o755, exist_ok=True)
            mount = f"shared={server.shared}"
            server.run("up", "-d", "--name", "test", "--scratch-bytes", SCRATCH, "--data-mount", mount)
    return server


def once(server: Server, name: str, *argv: str, timeout: float = 60) -> str:
    """Make a layer by a `barchan env` command unless another worker did. Returns its name."""
    with exclusive(server.data.with_suffix(".lock")):
        known = server.run("env", "ls")
        if not any(layer["name"] == name for layer in known if isinstance(layer, dict)):
            server.run("env", *argv, timeout=timeout)
    return name
