"""How long until a new sandbox has run its first command, and how many a second: python -m bench.create [--json] [-n N]

One at a time: create, run /bin/true, take the time, stop. Every few rounds the peers do the same with the same root file
system, in turns with us, so that a busy moment hits all of them. Then: how many create + exec + stop a second at several
degrees of concurrency, with client, API and node sharing the host's CPUs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from barchan import Client
from bench.figures import Figure, Spread, show, spread
from bench.peers import Peers, peers
from bench.rig import Rig, create, machine, options, rig

WARM = 20
PEER_EVERY = 25
CONCURRENCY = (4, 8, 16)
SUSTAINED_SECONDS = 6.0


async def one(client: Client) -> dict[str, float]:
    """Milliseconds from the request to the sandbox, to the first result, and to the end."""
    started = time.perf_counter()
    sandbox = await create(client)
    ready = time.perf_counter()
    await sandbox.run(["/bin/true"])
    first = time.perf_counter()
    await sandbox.stop()
    cycle = time.perf_counter()
    return {"ready": (ready - started) * 1e3, "first": (first - started) * 1e3, "cycle": (cycle - started) * 1e3}


async def in_turns(client: Client, rivals: Peers, n: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}

    def add(who: str, steps: dict[str, float]) -> None:
        for name, value in steps.items():
            samples.setdefault(f"{who}.{name}", []).append(value)

    for _ in range(WARM):
        await one(client)
    for i in range(n):
        add("barchan", await one(client))
        if i % PEER_EVERY == 0:
            for name in ("crun", "podman"):
                add(name, await asyncio.to_thread(rivals.run, name))
    return samples


async def sustained(client: Client, concurrency: int) -> float:
    """Create + exec + stop a second, over some seconds."""
    done = 0
    started = time.perf_counter()
    deadline = started + SUSTAINED_SECONDS

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < deadline:
            await one(client)
            done += 1

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done / (time.perf_counter() - started)


async def measure(bench: Rig, n: int) -> tuple[dict[str, Spread], dict[int, float]]:
    with peers(bench.rootfs, bench.work / "peers") as rivals:
        async with Client(data=bench.data) as client:
            samples = await in_turns(client, rivals, n)
            rates = {concurrency: await sustained(client, concurrency) for concurrency in CONCURRENCY}
    return {name: spread(sample) for name, sample in samples.items()}, rates


def figures(spreads: dict[str, Spread], rates: dict[int, float]) -> Iterable[Figure]:
    ours, crun, podman = spreads["barchan.first"], spreads["crun.cycle"], spreads["podman.cycle"]
    cycle = spreads["barchan.cycle"].p50
    yield Figure("create_vs_crun", crun.p50 / cycle, "x", 4, ">=", "whole cycles: create, start, exec, kill, delete")
    yield Figure("create_vs_podman", podman.p50 / cycle, "x", 10, ">=", "whole cycles: podman run --rm")
    yield Figure("node_create_vs_crun", None, "x", 10, ">=", "needs warm pools, which do not exist yet")
    yield Figure("create_first_result_p50", ours.p50, "ms", 10)
    yield Figure("create_first_result_p99", ours.p99, "ms", 40)
    yield Figure("create_ready_p50", spreads["barchan.ready"].p50, "ms")
    yield Figure("crun_cycle_p50", crun.p50, "ms")
    yield Figure("podman_run_p50", podman.p50, "ms")
    best = max(rates, key=lambda concurrency: rates[concurrency])
    yield Figure("sustained", rates[best], "1/s", 150, ">=", f"create + exec + stop at concurrency {best}")


def main() -> None:
    given = options(500)
    with rig() as bench:
        spreads, rates = asyncio.run(measure(bench, given.n))
        notes = [f"{name}: {spread_.text()} ms" for name, spread_ in spreads.items()]
    notes += [f"concurrency {concurrency}: {rate:.0f}/s" for concurrency, rate in rates.items()]
    show("create", [*figures(spreads, rates)], [*notes, machine()], given.json)


if __name__ == "__main__":
    main()
