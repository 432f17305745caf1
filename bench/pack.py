"""How long it takes to make a layer of what a sandbox has changed, and what its programs notice: python -m bench.pack [--json] [-n N]

Through the SDK, packed whole, the data written just before and not synced: nothing, one small file, 100 MB in one file and 100 MB in 1,000
files, new ones in every round. The first call of a node starts a process and is told apart. Meanwhile a program inside writes
4 KiB again and again and keeps the longest time between two writes; for as long as a call takes it does so before each call too, so that what is the
host's is seen. Then: how long `true` takes in another sandbox while 100 MB are packed, and when nothing is.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

from barchan import Client, Limits, Sandbox
from bench.figures import Figure, Spread, show, spread
from bench.rig import MIB, Rig, create, machine, options, rig

ROOM = Limits(memory=512 * MIB, pids=64, disk=1024 * MIB)
BIG, FILES = 100 * 1000 * 1000, 1000
SMALL_ROUNDS = 5
"""Of the small ones for one of the big ones."""
WRITER = r"""
#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
static long now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000L + t.tv_nsec / 1000; }
int main(void) {
    static char page[4096];
    int fd = open("/written", O_WRONLY | O_CREAT, 0600);
    long longest = 0, last = now();
    for (long n = 0; access("/stop", F_OK); n++) {
        if (pwrite(fd, page, sizeof page, n % 256 * (long)sizeof page) < 0) return 1;
        long at = now();
        if (at - last > longest) longest = at - last;
        last = at;
        usleep(200);
        last = now();
    }
    printf("%ld\n", longest);
    return 0;
}
"""
Samples = dict[str, list[float]]


def build(work: Path) -> bytes:
    """The program, for a root file system without a libc."""
    source, program = work / "writer.c", work / "writer"
    source.write_text(WRITER)
    subprocess.run(["cc", "-static", "-O2", "-o", program, source], check=True)
    return program.read_bytes()


async def timed(work: Awaitable[object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1e3


@contextlib.asynccontextmanager
async def writing(sandbox: Sandbox, longest: list[float]) -> AsyncIterator[None]:
    """Adds the longest gap that the writer saw, milliseconds."""
    await sandbox.files.remove("/stop", missing_ok=True)
    writer = await sandbox.start(["/writer"])
    await asyncio.sleep(0.05)
    yield
    await sandbox.files.write("/stop", b"")
    longest.append(int(b"".join([piece async for piece in writer.stdout])) / 1e3)
    await writer.wait()


async def one_file(sandbox: Sandbox) -> None:
    await sandbox.run(["/bin/dd", "if=/dev/urandom", "of=/blob", "bs=1000000", f"count={BIG // 10**6}"], check=True)


async def many_files(sandbox: Sandbox) -> None:
    each = f"count={BIG // FILES // 1000}"
    script = (
        f"i=0; while [ $i -lt {FILES} ]; do dd if=/dev/urandom of=/d/$i bs=1000 {each} 2>/dev/null; i=$((i+1)); done"
    )
    await sandbox.run(f"rm -rf /blob; mkdir -p /d; {script}", check=True)


async def packing(client: Client, n: int, program: bytes) -> Samples:
    samples: Samples = {}

    def note(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    async with await client.create("tiny", limits=ROOM) as sandbox:
        await sandbox.files.write("/writer", program, mode=0o755)
        note("first", await timed(sandbox.pack_diff("first", whole=True)))
        for round_ in range(n):
            for small in range(SMALL_ROUNDS):
                name = f"small-{round_}-{small}"
                async with await create(client) as fresh:
                    note("nothing", await timed(fresh.pack_diff(f"nothing-{round_}-{small}", whole=True)))
                    await fresh.files.write("/file", name.encode())
                    note("small", await timed(fresh.pack_diff(name, whole=True)))
            for kind, write in (("one", one_file), ("many", many_files)):
                await measured(sandbox, kind, write, round_, samples)
    return samples


async def measured(
    sandbox: Sandbox, kind: str, write: Callable[[Sandbox], Awaitable[None]], round_: int, samples: Samples
) -> None:
    await write(sandbox)
    samples.setdefault(kind, []).append(await timed(sandbox.pack_diff(f"{kind}-{round_}", whole=True)))
    await write(sandbox)
    async with writing(sandbox, samples.setdefault("gap_before", [])):
        await asyncio.sleep(samples[kind][-1] / 1e3)
    async with writing(sandbox, samples.setdefault("gap_during", [])):
        await sandbox.pack_diff(f"{kind}-{round_}-written", whole=True)


async def neighbours(client: Client, n: int) -> Samples:
    """Of `true` in another sandbox, milliseconds."""
    samples: Samples = {"true_alone": [], "true_beside": []}
    async with await client.create("tiny", limits=ROOM) as sandbox, await create(client) as other:
        await other.run(["/bin/true"])
        for round_ in range(n):
            await one_file(sandbox)
            samples["true_alone"] += [await timed(other.run(["/bin/true"])) for _ in range(20)]
            packed = asyncio.ensure_future(sandbox.pack_diff(f"beside-{round_}", whole=True))
            while not packed.done():
                samples["true_beside"].append(await timed(other.run(["/bin/true"])))
            await packed
    return samples


def figures(found: dict[str, Spread]) -> Iterable[Figure]:
    for name, bar in (("nothing", 50), ("small", None), ("one", 1000), ("many", 1000)):
        took, label = found[name], {"one": "100mb", "many": "100mb_1000_files"}.get(name, name)
        yield Figure(f"pack_{label}_p50", took.p50, "ms", bar, note=took.text())
        for part, value in (("min", took.low), ("max", took.high)):
            yield Figure(f"pack_{label}_{part}", value, "ms")
        yield Figure(f"pack_{label}_n", took.n, "rounds")
    yield Figure("pack_first", found["first"].p50, "ms", note="of a node: with the start of a process")
    pause, before = found["gap_during"], found["gap_before"]
    yield Figure("writer_gap_p50", pause.p50, "ms", note=pause.text())
    yield Figure("writer_gap_max", pause.high, "ms")
    yield Figure("writer_gap_without_p50", before.p50, "ms", note=before.text())
    yield Figure("writer_gap_without_max", before.high, "ms")
    yield Figure("true_beside_p50", found["true_beside"].p50, "ms", note=found["true_beside"].text())
    yield Figure("true_alone_p50", found["true_alone"].p50, "ms", note=found["true_alone"].text())


async def measure(bench: Rig, n: int) -> dict[str, Spread]:
    async with Client(data=bench.data) as client:
        samples = await packing(client, n, build(bench.work))
        samples |= await neighbours(client, n)
    return {name: spread(sample) for name, sample in samples.items()}


def main() -> None:
    given = options(10)
    with rig() as bench:
        found = asyncio.run(measure(bench, given.n))
    show("pack", [*figures(found)], [machine()], given.json)


if __name__ == "__main__":
    main()
