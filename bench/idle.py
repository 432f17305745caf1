"""Memory that an idle container holds: python -m bench.idle [--json] [-n N]

Over N containers that have run one command and wait: kernel memory that cannot be taken back (slab, stacks, page tables,
per-CPU), the guests' own memory, and what the node agent grew by. Page cache and the containers' files do not count. Once
as they are made for users, and once without a memory control group. Nothing is made ahead.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from barchan.spec import SandboxInfo
from bench.figures import Figure, show
from bench.node_link import Node, node
from bench.rig import machine, options, pss

KERNEL = {"SUnreclaim": "slab", "KernelStack": "stacks", "PageTables": "page tables", "Percpu": "per-CPU"}
AT_ONCE = 8
WARM = 10


def kernel() -> dict[str, int]:
    """Bytes by kind, of the whole host."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    values = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}
    return {KERNEL[name]: values[name] for name in KERNEL}


async def fill(agent: Node, n: int) -> list[SandboxInfo]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one() -> SandboxInfo:
        async with room:
            made = await agent.create()
            await agent.run(made.id, "/bin/true")
            return made

    return list(await asyncio.gather(*(one() for _ in range(n))))


async def measure(n: int, *, memory_group: bool) -> dict[str, float]:
    """KiB per container, by kind."""
    async with node(max_sandboxes=n + 50, pool_most=0, memory_group=memory_group) as agent:
        for made in await fill(agent, WARM):
            await agent.stop(made.id)
        before = {**kernel(), "node": pss(agent.pid)}
        sandboxes = await fill(agent, n)
        after = {**kernel(), "node": pss(agent.pid)}
        guests = sum(pss(made.pid) for made in sandboxes)
        kinds = {name: (after[name] - before[name]) / n / 1024 for name in before}
        await asyncio.gather(*(agent.stop(made.id) for made in sandboxes))
    return {**kinds, "guest": guests / n / 1024}


def has_v1_memory() -> bool:
    return any(" cgroup " in line and "memory" in line.rpartition(" ")[2] for line in mounts())


def mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def figures(usual: dict[str, float], without: dict[str, float]) -> list[Figure]:
    total, v1 = sum(usual.values()), has_v1_memory()
    note = "" if v1 else "no v1 memory here"
    return [
        Figure("idle_v1_memory", total if v1 else None, "KiB", 800 if v1 else None, note=note),
        Figure("idle_no_memory_cgroup", sum(without.values()), "KiB", 450),
        *([] if v1 else [Figure("idle_v2", total, "KiB")]),
        *parts("idle", usual),
        *parts("idle_without", without),
    ]


def parts(prefix: str, kinds: dict[str, float]) -> list[Figure]:
    return [
        Figure(f"{prefix}_{name.replace(' ', '_').replace('-', '_')}", value, "KiB") for name, value in kinds.items()
    ]


async def both(n: int) -> list[Figure]:
    without = await measure(n, memory_group=False)
    return figures(await measure(n, memory_group=True), without)


def main() -> None:
    given = options(500)
    found = asyncio.run(both(given.n))
    show("idle", found, [f"over {given.n} containers; other work on the host counts too", machine()], given.json)


if __name__ == "__main__":
    main()
