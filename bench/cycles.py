"""Does anything grow with sandboxes that have ended? python -m bench.cycles [--json] [-n N]

N times create, run, write a file, stop, eight at a time. At ten points everything stands still and is measured: memory and
descriptors of client, API, node agent and spawner, mounts, cgroups (those that are dying, too), network namespaces, loop
devices, subvolumes, quota groups, kernel memory that cannot be taken back, disk. What has a bar must be back where it was
after a warm-up. The registry remembers 10,000 ended sandboxes, on disk and in memory: it is filled before the start, so that
it is at its bound. The log grows until `log_bytes`; what a cycle adds is told.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from barchan import Client, EnvironmentRef, SandboxSpec
from barchan.cli.datadir import occupied, prepare
from barchan.config import Layout
from barchan.kernel.processes import boot_id
from barchan.node.registry import HISTORY, Registry
from barchan.pools import PoolInfo
from bench import leaks
from bench.audit import at_rest
from bench.figures import Figure, show
from bench.killer import service
from bench.rig import MIB, SMALL, machine, options, rig

AT_ONCE = 8
WARM = 400
SAMPLES = 10
SETTLE_SECONDS = 20.0

Sample = dict[str, float]


@dataclass(frozen=True)
class Bar:
    """How much a value may grow from the first sample to the last."""

    unit: str
    flat: float
    """Whatever the number of cycles."""
    each: float = 0.0
    """For each cycle beside that."""
    note: str = ""


BARS: dict[str, Bar] = {
    "client_memory": Bar("bytes", 4 * MIB),
    "api_memory": Bar("bytes", 4 * MIB),
    "node_memory": Bar("bytes", 8 * MIB, note="with the registry's history full from the start"),
    "spawner_memory": Bar("bytes", MIB),
    "client_fds": Bar("open", 2),
    "api_fds": Bar("open", 2),
    "node_fds": Bar("open", 4),
    "spawner_fds": Bar("open", 2),
    "mounts": Bar("mounts", 0, note="of all mount namespaces that processes are in"),
    "cgroups": Bar("groups", 0),
    "loops": Bar("devices", 0),
    "netns": Bar("namespaces", 4, note="of the server's processes"),
    "subvolumes": Bar("subvolumes", 0),
    "quota_groups": Bar("groups", 0),
    "id_ranges": Bar("ranges", 0),
    "scratch_used": Bar("bytes", 8 * MIB),
    "scratch_allocated": Bar("bytes", 256 * MIB, note="btrfs takes metadata room by the block group of 256 MiB"),
    "registry": Bar("bytes", 4 * MIB, note="with its history full from the start"),
    "log": Bar("bytes", MIB, each=8192),
    "SUnreclaim": Bar("bytes", 24 * MIB, each=512, note="of the whole host; one sandbox that stays is 300 KiB"),
    "dying_groups": Bar("groups", 64, each=0.02, note="memory cgroups of the whole host that are gone and still held"),
}


def anonymous(pid: int) -> int:
    """Resident bytes that are no file's: how many others map the same libraries does not matter."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def meminfo(name: str) -> int:
    """Bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == f"{name}:")


def dying_groups() -> int:
    """Memory cgroups that the kernel counts and no directory shows."""
    counted = next(
        int(line.split()[2]) for line in Path("/proc/cgroups").read_text().splitlines() if line.startswith("memory")
    )
    return counted - sum(1 for _ in os.walk("/sys/fs/cgroup/memory"))


def network_namespaces(pids: list[int]) -> int:
    """That the server's processes hold open or are in."""
    held = sum(n for pid in pids for name, n in leaks.descriptors(pid).items() if name == "net")
    return held + len({os.readlink(f"/proc/{pid}/ns/net") for pid in pids})


class Gauge:
    """Reads everything of one server."""

    def __init__(self, data: Path) -> None:
        self._layout = Layout(data)
        self._instance = self._layout.instance.read_text().strip()

    def pids(self) -> dict[str, int]:
        found = {name: service(self._layout.data, name) for name in ("api", "node", "spawner")}
        return {"client": os.getpid(), **{name: process.pid for name, process in found.items() if process}}

    def read(self, pool: PoolInfo) -> Sample:
        """Without what the node holds ready for the next sandboxes."""
        pids, layout = self.pids(), self._layout
        sample = {f"{name}_memory": float(anonymous(pid)) for name, pid in pids.items()}
        sample |= {f"{name}_fds": float(leaks.descriptors(pid).total()) for name, pid in pids.items()}
        sample["node_fds"] = leaks.own_descriptors(pids["node"])
        sample["spawner_fds"] -= 3 * pool.parked
        held = Counter(
            kind for kind, name in leaks.places(layout.data, self._instance) if not name.startswith(leaks.AHEAD)
        )
        counts: dict[str, Callable[[], float]] = {
            "mounts": lambda: sum(1 for _ in leaks.mounts(layout.data)),
            "cgroups": lambda: held["cgroup"],
            "loops": lambda: sum(1 for _ in leaks.loops(layout.data)),
            "netns": lambda: network_namespaces(list(pids.values())),
            "subvolumes": lambda: held["subvolume"],
            "quota_groups": lambda: len(leaks.quota_groups(layout.scratch)),
            "id_ranges": lambda: held["id range"],
            "scratch_used": lambda: leaks.used(layout.scratch),
            "scratch_allocated": lambda: leaks.allocated(layout.scratch),
            "registry": lambda: sum(occupied(path) for path in layout.data.glob("node.db*")),
            "log": lambda: sum(path.stat().st_size for path in layout.log.iterdir()),
            "SUnreclaim": lambda: meminfo("SUnreclaim"),
            "dying_groups": dying_groups,
        }
        return sample | {name: float(count()) for name, count in counts.items()}

    async def settled(self, client: Client, seconds: float) -> Sample:
        """Once the kernel has taken back what it takes back later: kernel memory falls no more."""
        end = time.monotonic() + seconds
        before = meminfo("SUnreclaim")
        while time.monotonic() < end:
            await asyncio.sleep(1)
            now = meminfo("SUnreclaim")
            if now > before - MIB:
                break
            before = now
        pool = await at_rest(client, self._layout.data)
        return await asyncio.to_thread(self.read, pool)


async def cycle(client: Client) -> None:
    async with await client.create("tiny", limits=SMALL, env={"A": "b"}, secrets={"TOKEN": "s"}) as sandbox:
        done = await sandbox.run("echo hello; echo $A > /tmp/file")
        assert done.stdout == b"hello\n", done
        await sandbox.files.write("/root/data", b"x" * 65536)


async def cycles(client: Client, n: int) -> None:
    left = n

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await cycle(client)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))


async def fill_history(data: Path, rows: int) -> None:
    """As if so many sandboxes had come and gone. The server must not run."""
    spec = SandboxSpec(environment=EnvironmentRef(base="tiny"), limits=SMALL, env={"A": "b"}, secrets={"TOKEN": "s"})
    now = time.time()

    async def one(registry: Registry, i: int) -> None:
        id = f"bench-{i:020d}"
        await registry.claim(id, spec, create_key=f"filled-{i:032d}", created=now, expires=now + 1)
        await registry.update(
            id,
            state="stopped",
            reason="stopped",
            pid=1,
            pid_start=1,
            boot=boot_id(),
            cgroup=f"pool-{i:016x}",
            ready_ms=1.5,
        )

    prepare(Layout(data))
    async with await Registry.open(Layout(data)) as registry:
        await asyncio.gather(*(one(registry, i) for i in range(rows)))


async def measure(
    data: Path, n: int, warm: int = WARM, samples: int = SAMPLES, settle: float = SETTLE_SECONDS
) -> list[Sample]:
    """The first sample is taken after the warm-up."""
    gauge = Gauge(data)
    async with Client(data=data) as client:
        await cycles(client, warm)
        found = [await gauge.settled(client, settle)]
        for i in range(samples):
            await cycles(client, n * (i + 1) // samples - n * i // samples)
            found.append(await gauge.settled(client, settle))
    return found


def figures(found: list[Sample], n: int) -> list[Figure]:
    """Growth against its bar. Of a noisy value the last samples count together: one that falls again did not leak."""
    result = []
    for name, bar in BARS.items():
        if name not in found[0]:
            result.append(Figure(f"growth_{name}", None, bar.unit, bar.flat, note="not readable here"))
            continue
        grown = min(sample[name] for sample in found[-2:]) - found[0][name]
        result.append(Figure(f"growth_{name}", grown, bar.unit, bar.flat + bar.each * n, note=bar.note))
    return result


def per_thousand(found: list[Sample], n: int) -> list[str]:
    course = {name: " ".join(f"{sample[name] - found[0][name]:.4g}" for sample in found[1:]) for name in found[0]}
    return [
        f"{name}: {(found[-1][name] - found[0][name]) / n * 1000:.4g} per 1,000 cycles ({course[name]})"
        for name in course
    ]


def main() -> None:
    given = options(10_000)
    began = time.monotonic()
    with rig(prepare=lambda data: asyncio.run(fill_history(data, HISTORY))) as bench:
        ready = time.monotonic()
        found = asyncio.run(measure(bench.data, given.n))
        seconds = time.monotonic() - ready
    notes = [
        *per_thousand(found, given.n),
        f"{given.n} cycles in {seconds:.0f} s, {ready - began:.0f} s to fill and start",
    ]
    lines = figures(found, given.n)
    show("cycles", lines, [*notes, machine()], given.json)
    raise SystemExit(any(line.ok is False for line in lines))


if __name__ == "__main__":
    main()
