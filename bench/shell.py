"""What a command in an open shell session costs, beside an exec and beside SWE-ReX: python -m bench.shell [--json] [-n N]

In turns: `true` as an exec, `true` in a shell session, both recorded and durable, and the same two of SWE-ReX's own server on
loopback without isolation. Then output: 20 MB of each in turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable

from barchan import Client, Sandbox
from bench.figures import Figure, Spread, show, spread
from bench.rex import OUTPUT, VERSION, Peer, peer
from bench.rig import Rig, create, machine, options, rig

WARM = 20
PEER_ROUNDS, OUTPUT_ROUNDS = 30, 5
"""Of the peer, whose session takes 0.1 s a command."""
POUR = ["/bin/dd", "if=/dev/zero", "bs=250k", f"count={OUTPUT // 256_000}"]
PROGRAM = "/bin/sh"
Samples = dict[str, list[float]]


async def timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1e3


async def commands(sandbox: Sandbox, rex: Peer, n: int) -> Samples:
    samples: Samples = {"exec": [], "shell": [], "rex_execute": [], "rex_session": []}
    async with sandbox.shell(PROGRAM) as shell:
        for _ in range(WARM):
            await sandbox.run(["/bin/true"])
            await shell.run("true")
        for round_ in range(n):
            samples["exec"].append(await timed(sandbox.run(["/bin/true"])))
            samples["shell"].append(await timed(shell.run("true")))
            if round_ * PEER_ROUNDS // n != (round_ - 1) * PEER_ROUNDS // n:
                samples["rex_execute"].append(await asyncio.to_thread(rex.run, "execute"))
                samples["rex_session"].append(await asyncio.to_thread(rex.run, "session"))
    return samples


async def outputs(sandbox: Sandbox, rex: Peer) -> Samples:
    """MB/s of output collected by one call, in turns."""
    rates: Samples = {"exec": [], "rex": []}
    for _ in range(OUTPUT_ROUNDS):
        rates["exec"].append(OUTPUT / 1e3 / await timed(sandbox.run(POUR)))
        rates["rex"].append(OUTPUT / 1e3 / await asyncio.to_thread(rex.run, "output"))
    return rates


def figures(took: dict[str, Spread], rates: dict[str, Spread]) -> Iterable[Figure]:
    peer_name = f"SWE-ReX {VERSION}, no isolation"
    yield Figure("execute_vs_swerex", took["rex_execute"].p50 / took["exec"].p50, "x", 2, ">=", peer_name)
    yield Figure("session_vs_swerex", took["rex_session"].p50 / took["shell"].p50, "x", 30, ">=", peer_name)
    yield Figure("output_vs_swerex", rates["exec"].p50 / rates["rex"].p50, "x", 15, ">=", peer_name)
    yield Figure("shell_over_exec_p50", took["shell"].p50 - took["exec"].p50, "ms", 1)
    yield Figure("shell_p50", took["shell"].p50, "ms")
    yield Figure("exec_p50", took["exec"].p50, "ms")


async def measure(bench: Rig, rex: Peer, n: int) -> tuple[list[Figure], list[str]]:
    async with Client(data=bench.data) as client, await create(client) as sandbox:
        took = {name: spread(sample) for name, sample in (await commands(sandbox, rex, n)).items()}
        rates = {name: spread(sample) for name, sample in (await outputs(sandbox, rex)).items()}
    notes = [f"{name}: {of.text()} ms" for name, of in took.items()]
    return list(figures(took, rates)), notes + [f"output of {name}: {of.text()} MB/s" for name, of in rates.items()]


def main() -> None:
    given = options(500)
    with rig() as bench, peer(bench.work) as rex:
        found, notes = asyncio.run(measure(bench, rex, given.n))
    show("shell", found, [*notes, machine()], given.json)


if __name__ == "__main__":
    main()
