"""Workspace and toolkits as layers, against archives that every sandbox unpacks: python -m bench.compose [--json] [-n N]

The workspace is a Python project with its dependencies, the two toolkits are what an agent brings; all from PyPI, with their
compiled modules. N sandboxes are set up each way, in turns of a few: create, what makes the three trees appear, and one command
that uses them. The archives are there already, in a directory that the sandboxes mount. Bytes written are those of the scratch
volume's own block device; what the layers took once, when they were imported, is shown beside.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from barchan import Client, DataMount, Limits, Sandbox
from bench import cpu
from bench.figures import Figure, show, spread
from bench.rig import DISK, GIB, MIB, Rig, barchan, machine, options, rig
from bench.written import device_of, to_device

BASE = "debian-12" if sys.version_info < (3, 13) else "debian-13"
PARTS = {
    "workspace": ("opt/project", "django requests"),
    "toolkit-checks": ("opt/checks", "pytest pyflakes"),
    "toolkit-shell": ("opt/shell", "rich"),
}
"""Environment: where its tree is, and the packages in it."""
CHECK = "import sys; sys.path[:0] = ['/opt/project', '/opt/checks', '/opt/shell']; import django, pytest, rich"
AT_ONCE = 8
LIMITS = Limits(memory=256 * MIB, pids=64, disk=GIB)
UNPACK = "for part in /parts/*.tar.gz; do tar -xzf $part -C / || exit 1; done"


@dataclass(frozen=True)
class Way:
    """One way to set sandboxes up."""

    seconds: float
    each: list[float]
    """From create to the end of the check, seconds."""
    cpu_seconds: float
    """Of the whole machine."""
    written: int


@contextmanager
def trees() -> Iterator[Path]:
    """A directory with the tree of each part, and `archives/` with their archives."""
    with tempfile.TemporaryDirectory(prefix="barchan-bench-parts-", dir=DISK) as name:
        root = Path(name)
        (root / "archives").mkdir()
        root.chmod(0o755)
        for part, (place, packages) in PARTS.items():
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-warn-conflicts", "--root-user-action", "ignore"]
            command = [*pip, "--only-binary", ":all:", "--target", str(root / part / place), *packages.split()]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
            (root / part).chmod(0o755)
            archive = str(root / f"archives/{part}.tar.gz")
            subprocess.run(["tar", "-C", str(root / part), "-czf", archive, "."], check=True)
        yield root


async def layered(client: Client) -> Sandbox:
    workspace, *toolkits = PARTS
    return await client.create(base=BASE, workspace=workspace, toolkits=toolkits, limits=LIMITS)


async def unpacked(client: Client) -> Sandbox:
    sandbox = await client.create(base=BASE, limits=LIMITS, mounts=[DataMount(source="parts", target="/parts")])
    (await sandbox.run(UNPACK, timeout=300)).check()
    return sandbox


async def measure(bench: Rig, client: Client, n: int, make: Callable[[Client], Awaitable[Sandbox]]) -> Way:
    device = device_of(bench.data / "scratch.img")
    before, used, each = to_device(device), cpu.everything(), list[float]()
    began = time.perf_counter()
    room = asyncio.Semaphore(AT_ONCE)

    async def one() -> Sandbox:
        async with room:
            started = time.perf_counter()
            sandbox = await make(client)
            (await sandbox.run(["python3", "-c", CHECK], timeout=300)).check()
            each.append(time.perf_counter() - started)
            return sandbox

    sandboxes = await asyncio.gather(*(one() for _ in range(n)))
    seconds, used = time.perf_counter() - began, cpu.everything() - used
    written = to_device(device) - before
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    return Way(seconds, each, used / 1e6, written)


async def both(bench: Rig, n: int) -> tuple[Way, Way]:
    async with Client(data=bench.data) as client:
        for make in (layered, unpacked):  # what is first of all is not measured
            await (await make(client)).stop()
        return await measure(bench, client, n, layered), await measure(bench, client, n, unpacked)


def imported(data: Path, parts: Path) -> int:
    """Bytes of the layers."""
    barchan(data, "env", "bootstrap", BASE)
    before = size_of(data / "layers")
    for part in PARTS:
        barchan(data, "env", "import", part, str(parts / part))
    return size_of(data / "layers") - before


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def figures(ours: Way, theirs: Way, layers: int, n: int) -> Iterator[Figure]:
    yield Figure("compose_faster", theirs.seconds / ours.seconds, "x", 5, ">=", f"set-up of {n}, {AT_ONCE} at a time")
    yield Figure("compose_fewer_bytes", theirs.written / ours.written, "x", 20, ">=", "written to the scratch volume")
    once = theirs.written / (ours.written + layers)
    yield Figure("compose_fewer_bytes_with_import", once, "x", note="the layers themselves counted too, once")
    yield Figure("compose_less_cpu", theirs.cpu_seconds / ours.cpu_seconds, "x", note="of the whole machine")
    for name, way in (("layers", ours), ("archives", theirs)):
        yield Figure(f"compose_{name}_p50", spread(way.each).p50 * 1e3, "ms")
        yield Figure(f"compose_{name}_total", way.seconds, "s")
        yield Figure(f"compose_{name}_written", way.written / n / MIB, "MiB", note="per sandbox")


def main() -> None:
    given = options(64)
    layers: list[int] = []
    with trees() as parts:
        sizes = [f"{part} {size_of(parts / part) / MIB:.0f} MiB in {count(parts / part)} files" for part in PARTS]
        mount = ("--data-mount", f"parts={parts / 'archives'}")
        with rig("5g", prepare=lambda data: layers.append(imported(data, parts)), settings=mount) as bench:
            ours, theirs = asyncio.run(both(bench, given.n))
    title = f"compose: {given.n} sandboxes of {BASE}, a workspace and two toolkits"
    show(title, [*figures(ours, theirs, layers[0], given.n)], ["; ".join(sizes), machine()], given.json)


def count(directory: Path) -> int:
    return sum(path.is_file() for path in directory.rglob("*"))


if __name__ == "__main__":
    main()
