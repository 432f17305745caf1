"""Memory that an idle container holds: python -m bench.idle [--json] [-n N]

Over N containers that have run one command and wait: kernel memory that cannot be taken back (slab, stacks, page tables,
per-CPU), the guests' own memory, and what API and node agent grew by. Page cache and the containers' files do not count.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from barchan import Client, Sandbox
from bench.figures import Figure, show
from bench.rig import Rig, create, machine, options, pss, rig

KERNEL = {"SUnreclaim": "slab", "KernelStack": "stacks", "PageTables": "page tables", "Percpu": "per-CPU"}
AT_ONCE = 8
WARM = 10


def kernel() -> dict[str, int]:
    """Bytes by kind, of the whole host."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    values = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
    return {KERNEL[name]: values[name] for name in KERNEL}


def servers(bench: Rig) -> dict[str, int]:
    return {name: pss(pid) for name, pid in bench.pids().items()}


async def fill(client: Client, n: int) -> list[Sandbox]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one() -> Sandbox:
        async with room:
            sandbox = await create(client)
            await sandbox.run(["/bin/true"])
            return sandbox

    return list(await asyncio.gather(*(one() for _ in range(n))))


async def measure(bench: Rig, n: int) -> dict[str, float]:
    """KiB per container, by kind."""
    async with Client(data=bench.data) as client:
        for sandbox in await fill(client, WARM):
            await sandbox.stop()
        before = {**kernel(), **servers(bench)}
        sandboxes = await fill(client, n)
        after = {**kernel(), **servers(bench)}
        guests = sum(pss(sandbox.info.pid) for sandbox in sandboxes)
        kinds = {name: (after[name] - before[name]) / n / 1024 for name in before}
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    return {**kinds, "guest": guests / n / 1024}


def has_v1_memory() -> bool:
    return any(" cgroup " in line and "memory" in line.rpartition(" ")[2] for line in mounts())


def mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def figures(kinds: dict[str, float]) -> list[Figure]:
    total = sum(kinds.values())
    v1 = has_v1_memory()
    parts = [Figure(f"idle_{name.replace(' ', '_').replace('-', '_')}", value, "KiB") for name, value in kinds.items()]
    return [
        Figure(
            "idle_v1_memory", total if v1 else None, "KiB", 800 if v1 else None, note="" if v1 else "no v1 memory here"
        ),
        Figure("idle_no_memory_cgroup", None, "KiB", 450, note="a limit on memory cannot be turned off yet"),
        *([] if v1 else [Figure("idle_v2", total, "KiB")]),
        *parts,
    ]


def main() -> None:
    given = options(500)
    with rig(max_sandboxes=given.n + 50) as bench:
        kinds = asyncio.run(measure(bench, given.n))
    show(
        "idle", figures(kinds), [f"over {given.n} containers; other work on the host counts too", machine()], given.json
    )


if __name__ == "__main__":
    main()
