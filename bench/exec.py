"""What a command costs, recorded and durable, beside the least it could: python -m bench.exec [--json] [-n N]

In turns: `true` in a sandbox, posix_spawn and wait of the same static binary on the host, and one durable call through a bare
chain of processes with the same hops. Then 200 MB of output, beside the same bytes through a bare chain that appends them to
a file and syncs it once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable

from barchan import Client, Sandbox
from bench.figures import Figure, Spread, show, spread
from bench.relay import call_chain, stream_chain
from bench.rig import MIB, Rig, cpu_us, create, machine, options, rig, rss

WARM = 50
OUTPUT = 200 * MIB
STREAMS = 3
POUR = ["/bin/dd", "if=/dev/zero", "bs=256k", f"count={OUTPUT // (256 * 1024)}"]
"""Large writes, as the relay's: a program that writes byte by byte would be measured instead of the path."""


def spawn(program: str) -> float:
    """posix_spawn and wait, milliseconds."""
    started = time.perf_counter()
    pid = os.posix_spawn(program, ["true"], {})
    os.waitpid(pid, 0)
    return (time.perf_counter() - started) * 1e3


async def true(sandbox: Sandbox) -> float:
    started = time.perf_counter()
    await sandbox.run(["/bin/true"])
    return (time.perf_counter() - started) * 1e3


async def calls(
    bench: Rig, sandbox: Sandbox, relay: Callable[[], float], n: int
) -> tuple[dict[str, Spread], dict[str, float]]:
    """Times of each kind, and CPU microseconds per command by process."""
    for _ in range(WARM):
        await true(sandbox)
        relay()
    program = str(bench.rootfs / "bin/true")
    watched = {**bench.pids(), "client": os.getpid()}
    samples: dict[str, list[float]] = {"barchan": [], "spawn": [], "relay": []}
    for _ in range(n):
        samples["barchan"].append(await true(sandbox))
        samples["spawn"].append(spawn(program))
        samples["relay"].append(relay())
    before = {name: cpu_us(pid) for name, pid in watched.items()}
    for _ in range(n):
        await true(sandbox)
    cpu = {name: (cpu_us(pid) - before[name]) / n for name, pid in watched.items()}
    return {name: spread(sample) for name, sample in samples.items()}, cpu


async def pour(sandbox: Sandbox) -> float:
    """Seconds to take all of the output, thrown away as it comes."""
    started = time.perf_counter()
    taken = 0
    process = await sandbox.start(POUR, output_limit=2 * OUTPUT)
    async for chunk in process.stdout:
        taken += len(chunk)
    await process.wait()
    assert taken == OUTPUT, taken
    return time.perf_counter() - started


async def streams(
    bench: Rig, sandbox: Sandbox, relay: Callable[[], float]
) -> tuple[list[float], list[float], dict[str, float]]:
    """MB/s of both, in turns, and each process's growth in MiB at its highest."""
    pids = {**bench.pids(), "client": os.getpid()}
    idle = {name: rss(pid) for name, pid in pids.items()}
    grown = dict.fromkeys(pids, 0.0)
    ours, theirs = [], []

    async def watch() -> None:
        while True:
            for name, pid in pids.items():
                grown[name] = max(grown[name], (rss(pid) - idle[name]) / MIB)
            await asyncio.sleep(0.02)

    for _ in range(STREAMS):
        watcher = asyncio.create_task(watch())
        ours.append(OUTPUT / 1e6 / await pour(sandbox))
        watcher.cancel()
        theirs.append(OUTPUT / 1e6 / await asyncio.to_thread(relay))
    return ours, theirs, grown


def call_figures(spreads: dict[str, Spread], cpu: dict[str, float]) -> Iterable[Figure]:
    ours, bound = spreads["barchan"], spreads["spawn"].p50 + 2 * spreads["relay"].p50
    yield Figure("exec_vs_bound", ours.p50 / bound, "x", 1, "<=", "bound = posix_spawn + 2 x relay with fdatasync")
    yield Figure("exec_true_p50", ours.p50, "ms", bound)
    yield Figure("exec_true_p99", ours.p99, "ms")
    yield Figure("posix_spawn_p50", spreads["spawn"].p50, "ms")
    yield Figure("relay_p50", spreads["relay"].p50, "ms")
    for name, value in cpu.items():
        yield Figure(f"exec_cpu_{name}", value, "us")


def stream_figures(ours: list[float], theirs: list[float], grown: dict[str, float]) -> Iterable[Figure]:
    rate, bare = spread(ours).p50, spread(theirs).p50
    yield Figure("output_vs_relay", rate / bare, "x", 0.6, ">=", "200 MB, recorded")
    yield Figure("output_rate", rate, "MB/s")
    yield Figure("relay_rate", bare, "MB/s")
    for name, value in grown.items():
        yield Figure(f"output_memory_{name}", value, "MiB", 64)


async def measure(
    bench: Rig, n: int, call: Callable[[], float], pull: Callable[[], float]
) -> tuple[list[Figure], list[str]]:
    async with Client(data=bench.data) as client, await create(client) as sandbox:
        spreads, cpu = await calls(bench, sandbox, call, n)
        ours, theirs, grown = await streams(bench, sandbox, pull)
    found = [*call_figures(spreads, cpu), *stream_figures(ours, theirs, grown)]
    notes = [f"{name}: {spread_.text()} ms" for name, spread_ in spreads.items()]
    rates = {"output": ours, "relay output": theirs}
    return found, notes + [f"{name}: {spread(rate).text()} MB/s" for name, rate in rates.items()]


def main() -> None:
    given = options(1000)
    with rig() as bench, call_chain(bench.work) as call, stream_chain(bench.work, OUTPUT) as pull:
        found, notes = asyncio.run(measure(bench, given.n, call, pull))
    show("exec", found, [*notes, machine()], given.json)


if __name__ == "__main__":
    main()
