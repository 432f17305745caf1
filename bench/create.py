"""How long until a new sandbox has run its first command, and how many a second: python -m bench.create [--json] [-n N]

One at a time: create, run /bin/true, take the time, stop. Every few rounds the peers do the same with the same root file
system, in turns with us, so that a busy moment hits all of them. Then: how many create + exec + stop a second at several
degrees of concurrency, with client, API and node sharing the host's CPUs; what is made ahead for them is made meanwhile.
Last, the same at the socket of a node agent without API and SDK, in bursts as long as its pool is warm.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from barchan import Client, NodeInfo
from bench import cpu
from bench.figures import Figure, Spread, show, spread
from bench.node_link import Node, node
from bench.peers import Peers, peers
from bench.rig import Rig, create, machine, options, rig

WARM = 20
PEER_EVERY = 25
CONCURRENCY = (1, 4, 8, 16)
SUSTAINED_SECONDS = 6.0
REST_SECONDS = 0.15
BURST = 8
"""Creations at the node's socket before it gets time to fill its pool again."""


@dataclass(frozen=True)
class Sustained:
    rate: float
    cpu_us: dict[str, float]
    """Per cycle, by process."""


async def timed(steps: dict[str, Callable[[], Awaitable[Any]]]) -> dict[str, float]:
    """Milliseconds from the beginning to the end of each step."""
    began, ends = time.perf_counter(), {}
    for name, step in steps.items():
        await step()
        ends[name] = (time.perf_counter() - began) * 1e3
    return ends


async def one(client: Client) -> dict[str, float]:
    """To the sandbox, to the first result, and to the end."""
    made: list[Any] = []

    async def ready() -> None:
        made.append(await create(client))

    return await timed({"ready": ready, "first": lambda: made[0].run(["/bin/true"]), "cycle": lambda: made[0].stop()})


async def one_at_node(agent: Node) -> dict[str, float]:
    made: list[Any] = []

    async def ready() -> None:
        made.append((await agent.create()).id)

    return await timed(
        {"ready": ready, "first": lambda: agent.run(made[0], "/bin/true"), "cycle": lambda: agent.stop(made[0])}
    )


def add(samples: dict[str, list[float]], who: str, steps: dict[str, float]) -> None:
    for name, value in steps.items():
        samples.setdefault(f"{who}.{name}", []).append(value)


async def in_turns(client: Client, rivals: Peers, n: int, samples: dict[str, list[float]]) -> None:
    for _ in range(WARM):
        await one(client)
    for i in range(n):
        add(samples, "barchan", await one(client))
        if i % PEER_EVERY == 0:
            for name in ("crun", "podman"):
                add(samples, name, await asyncio.to_thread(rivals.run, name))


async def at_node(n: int, rivals: Peers, samples: dict[str, list[float]]) -> NodeInfo:
    async with node() as agent:
        for _ in range(WARM):
            await one_at_node(agent)
        for i in range(n):
            if i % BURST == 0:
                await until_filled(agent)
                add(samples, "crun", await asyncio.to_thread(rivals.run, "crun"))
            add(samples, "node", await one_at_node(agent))
        return await agent.info()


async def until_filled(agent: Node) -> None:
    """Until it holds what a burst takes, and makes no more beside it."""
    before = -1
    async with asyncio.timeout(30):
        while (pool := (await agent.info()).pool).ready < BURST or pool.refills != before or pool.removing:
            before = pool.refills
            await asyncio.sleep(REST_SECONDS)


def sandboxes(data: Path) -> dict[str, Path]:
    """The cgroup v2 directory that all sandboxes of a server are in."""
    name = "barchan-" + (data / "instance").read_text().strip()
    hybrid = Path("/sys/fs/cgroup/unified") / name
    return {"sandboxes": hybrid if hybrid.exists() else Path("/sys/fs/cgroup") / name}


async def sustained(client: Client, processes: dict[str, int], groups: dict[str, Path], concurrency: int) -> Sustained:
    """Create + exec + stop a second, over some seconds."""
    done, before = 0, cpu.used(processes, groups)
    started = time.perf_counter()
    deadline = started + SUSTAINED_SECONDS

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < deadline:
            await one(client)
            done += 1

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds = time.perf_counter() - started
    return Sustained(done / seconds, cpu.used(processes, groups).since(before, done))


@dataclass(frozen=True)
class Measured:
    spreads: dict[str, Spread]
    rates: dict[int, Sustained]
    served: NodeInfo
    """The node behind the API, at the end."""
    alone: NodeInfo


async def measure(bench: Rig, n: int) -> Measured:
    samples: dict[str, list[float]] = {}
    with peers(bench.rootfs, bench.work / "peers") as rivals:
        async with Client(data=bench.data) as client:
            await in_turns(client, rivals, n, samples)
            processes = {**bench.pids(), "client": os.getpid(), **cpu.children(bench.pids()["node"], "spawner")}
            groups = sandboxes(bench.data)
            rates = {each: await sustained(client, processes, groups, each) for each in CONCURRENCY}
            (served,) = await client.nodes()
        alone = await at_node(n, rivals, samples)
    return Measured({name: spread(sample) for name, sample in samples.items()}, rates, served, alone)


def figures(measured: Measured) -> Iterable[Figure]:
    spreads, rates = measured.spreads, measured.rates
    ours, crun, podman = spreads["barchan.first"], spreads["crun.cycle"].p50, spreads["podman.cycle"].p50
    cycle = spreads["barchan.cycle"].p50
    yield Figure("create_vs_crun", crun / cycle, "x", 4, ">=", "whole cycles: create, start, exec, kill, delete")
    yield Figure("create_vs_podman", podman / cycle, "x", 10, ">=", "whole cycles: podman run --rm")
    at_node = spreads["node.cycle"].p50
    yield Figure("node_create_vs_crun", crun / at_node, "x", 10, ">=", "whole cycles at the node's socket, warm pool")
    yield Figure("create_first_result_p50", ours.p50, "ms", 10)
    yield Figure("create_first_result_p99", ours.p99, "ms", 40)
    yield Figure("create_ready_p50", spreads["barchan.ready"].p50, "ms")
    yield Figure("node_cycle_p50", at_node, "ms")
    yield Figure("crun_cycle_p50", crun, "ms")
    yield Figure("podman_run_p50", podman, "ms")
    best = max(rates, key=lambda concurrency: rates[concurrency].rate)
    yield Figure("sustained", rates[best].rate, "1/s", 150, ">=", f"create + exec + stop at concurrency {best}")
    for name, used in rates[best].cpu_us.items():
        yield Figure(f"sustained_cpu_{name}", used, "us", note="per cycle" + REST * (name == "rest"))
    yield from pool_figures(measured.served, "")
    yield from pool_figures(measured.alone, "node_")


REST = ": kernel threads, everything else on this machine"


def pool_figures(info: NodeInfo, prefix: str) -> Iterable[Figure]:
    pool = info.pool
    asked = pool.hits + pool.parked_hits + pool.misses
    yield Figure(f"{prefix}pool_hits", pool.hits / asked * 100, "%", note=f"of {asked}; {pool.parked_hits} half-made")
    yield Figure(f"{prefix}pool_refill", pool.refill_ms, "ms", note=f"{pool.refills} made, {pool.discarded} unused")
    if pool.spawn_ms:
        note = f"{pool.attach_ms} of {pool.spawn_ms} ms in the spawner"
        yield Figure(f"{prefix}cgroup_attach_share", pool.attach_ms / pool.spawn_ms * 100, "%", note=note)


def main() -> None:
    given = options(500)
    with rig() as bench:
        measured = asyncio.run(measure(bench, given.n))
    notes = [f"{name}: {spread_.text()} ms" for name, spread_ in measured.spreads.items()]
    for concurrency, run in measured.rates.items():
        shares = ", ".join(f"{name} {used / 1000:.2f}" for name, used in run.cpu_us.items())
        notes.append(f"concurrency {concurrency}: {run.rate:.0f}/s; CPU ms per cycle: {shares}")
    show("create", [*figures(measured)], [*notes, machine()], given.json)


if __name__ == "__main__":
    main()
