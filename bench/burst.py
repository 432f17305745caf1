"""Many containers over many images at once: python -m bench.burst [--json] [--images N] [--containers N]

Each container runs its image's own test command. Three ways, with the same images and as many containers at a time:
on demand, the layers in a JuiceFS file system behind a slow link, its cache emptied; eager, every image fetched through the same
link and unpacked first; local, the layers on the node's disk. Images are converted beforehand: once, whoever uses them how often.

Cold means: the server is stopped and its layers unmounted; JuiceFS is unmounted, its cache directory removed, and mounted
again; of local images the pages are dropped from the page cache (posix_fadvise). The eager way finds what it has just written.
The latency is added to each round trip, half of it each way; the rate is that of all connections together.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from barchan import BarchanError, Client, Limits, Sandbox
from barchan.layers.pull import pull
from barchan.layers.store import LayerStore
from bench import burst_eager, burst_images
from bench.burst_images import RECIPES, Made
from bench.figures import Figure, show
from bench.rig import DISK, GIB, MIB, Rig, barchan, machine
from bench.written import by_children, by_processes, device_of, to_device
from tests.juicefs import JuiceFS, juicefs
from tests.registry import Registry, running

LIMITS = Limits(memory=GIB, pids=256, disk=256 * MIB)
LEAST_IMAGES = 10
ROOM = 1100 * MIB
"""Of disk for one image: as blob, as layer, as objects, as tree."""
SPARE = 6 * GIB
GONE = 30.0
"""Seconds without the endpoint."""
KILLED_WITHIN = 10.0
BACK = 90.0
"""Seconds in which new containers must work again."""
JUICEFS = ("--prefetch", "0", "--max-readahead", "1", "--io-retries", "1000")
"""As docs/how-to/shared-store.md says: nothing is fetched that is not read, and nothing is given up."""


@dataclass(frozen=True)
class Options:
    json: bool
    images: int
    containers: int
    at_once: int
    latency: float
    rate: float


@dataclass
class Way:
    """One way to run the burst."""

    seconds: float = 0.0
    written: int = 0
    fetched: int = 0


@dataclass
class Outage:
    """What became of containers that were running when the endpoint went."""

    ends: Counter[str]
    killed: list[float | None]
    """Seconds that it took to end one meanwhile; None for one that did not end."""
    later: float | None = None
    """Seconds after it came back until a new container worked."""
    said: str = ""
    """Why the first did not."""


def options() -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for programs")
    parser.add_argument("--images", type=int, default=len(RECIPES), help=f"distinct images [{len(RECIPES)}]")
    parser.add_argument("--containers", type=int, default=200, help="containers over them [200]")
    parser.add_argument("--at-once", type=int, default=16, help="containers at a time [16]")
    parser.add_argument("--latency-ms", type=float, default=2.0, help="added to each round trip [2]")
    parser.add_argument("--rate-mb", type=float, default=200.0, help="MB/s of the link [200]")
    given = parser.parse_args()
    return Options(
        given.json, given.images, given.containers, given.at_once, given.latency_ms / 1e3, given.rate_mb * 1e6
    )


def fitting(wanted: int) -> int:
    """As many images as the disk has room for."""
    fit = int((shutil.disk_usage(DISK).free - SPARE) // ROOM)
    if fit < min(wanted, LEAST_IMAGES):
        raise SystemExit(f"{DISK} has room for {fit} images, at least {min(wanted, LEAST_IMAGES)} are needed")
    return min(wanted, fit)


# --- with barchan


@contextmanager
def server(data: Path, registry: Registry, shared: JuiceFS | None = None) -> Iterator[Rig]:
    """Stopped afterwards: then no layer is mounted any more."""
    conf = str(registry.access.registries_conf)
    store = ("--layers", str(shared.root)) if shared else ()
    barchan(data, "up", "-d", "--name", "burst", "--scratch-bytes", "2g", "--registries-conf", conf, *store)
    try:
        yield Rig(data.parent, data, data)
    finally:
        barchan(data, "down")


def references(registry: Registry, images: Sequence[Made]) -> dict[str, Made]:
    return {registry.ref(f"{burst_images.REPOSITORY}:{image.tag}"): image for image in images}


async def one(client: Client, ref: str, image: Made, seen: Callable[[Sandbox], object] = lambda sandbox: None) -> None:
    sandbox = await client.create(image=ref, limits=LIMITS, timeout=300)
    try:
        seen(sandbox)
        (await sandbox.run(image.command, timeout=600)).check()
    finally:
        await sandbox.stop()


async def all_of(data: Path, images: dict[str, Made], given: Options) -> float:
    """Seconds until the last has run its test."""
    room = asyncio.Semaphore(given.at_once)

    async def bounded(client: Client, ref: str, image: Made) -> None:
        async with room:
            await one(client, ref, image)

    async with Client(data=data) as client:
        began = time.perf_counter()
        burst = islice(cycle(images.items()), given.containers)
        await asyncio.gather(*(bounded(client, ref, image) for ref, image in burst))
        return time.perf_counter() - began


def measured(data: Path, registry: Registry, images: dict[str, Made], given: Options, shared: JuiceFS | None) -> Way:
    with server(data, registry, shared) as bench:
        device, pids = device_of(data / "scratch.img"), [*bench.pids().values(), *(shared.pids() if shared else ())]
        before, fetched = to_device(device) + by_processes(pids), shared.fetched() if shared else 0
        seconds = asyncio.run(all_of(data, images, given))
        written = to_device(device) + by_processes(pids) - before
        return Way(seconds, written, (shared.fetched() if shared else 0) - fetched)


def convert(root: Path, registry: Registry, images: dict[str, Made]) -> int:
    """Into a new store. Returns the bytes of its layers, each counted once."""
    store = LayerStore(root)
    for ref in images:
        print(f"converting {ref}", file=sys.stderr)
        pull(store, ref, access=registry.access)
    return verified(store)


def verified(store: LayerStore) -> int:
    """Read once, so that no first use does it."""
    sizes = store.sizes()
    for digest in sizes:
        store.verify(digest)
    return sum(sizes.values())


def forget_pages(root: Path) -> None:
    os.sync()
    for path in (path for path in (root / "layers").rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- the endpoint goes


async def outage(data: Path, images: dict[str, Made], shared: JuiceFS, given: Options) -> Outage:
    result, sandboxes = Outage(Counter(), []), list[Sandbox]()

    async def watched(client: Client, ref: str, image: Made) -> None:
        try:
            await one(client, ref, image, sandboxes.append)
            result.ends["worked"] += 1
        except BarchanError as error:
            result.ends[f"{error.code} in phase {error.phase}" if error.phase else error.code] += 1

    async with Client(data=data) as client:
        burst = list(islice(cycle(images.items()), given.at_once))
        running = [asyncio.ensure_future(watched(client, *pair)) for pair in burst]
        while not sandboxes:
            await asyncio.sleep(0.05)
        shared.link.cut()
        began = time.perf_counter()
        await asyncio.sleep(GONE / 3)
        for sandbox in sandboxes[: len(sandboxes) // 2 + 1]:
            result.killed.append(await ended(sandbox))
        await asyncio.sleep(max(0.0, began + GONE - time.perf_counter()))
        shared.link.restore()
        await asyncio.gather(*running)
        await again(client, burst[0], result)
    return result


async def again(client: Client, pair: tuple[str, Made], result: Outage) -> None:
    """Until a new one works."""
    began = time.perf_counter()
    while time.perf_counter() - began < BACK:
        try:
            await one(client, *pair)
        except BarchanError as error:
            result.said = result.said or f"{error.code}: {error}"
            await asyncio.sleep(1)
        else:
            result.later = time.perf_counter() - began
            return


async def ended(sandbox: Sandbox) -> float | None:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(GONE / 2):
            await sandbox.stop()
    except (TimeoutError, BarchanError):
        return None
    return time.perf_counter() - began


# --- all of it


def burst(work: Path, registry: Registry, made: Sequence[Made], given: Options) -> tuple[dict[str, Way], int, Outage]:
    images, ways = references(registry, made), dict[str, Way]()
    local, shared_data = work / "local", work / "shared"
    size = convert(local / "layers", registry, images)
    forget_pages(local)
    ways["local"] = measured(local, registry, images, given, None)
    with juicefs(
        work / "jfs",
        delay=given.latency / 2,
        rate=given.rate,
        options=JUICEFS,
        also=(registry.port,),
    ) as shared:
        shutil.copytree(local / "layers", shared.root, dirs_exist_ok=True)
        barchan(local, "down", "--delete")
        shared.empty_cache()
        ways["on demand"] = measured(shared_data, registry, images, given, shared)
        shared.empty_cache()
        with server(shared_data, registry, shared):
            lost = asyncio.run(outage(shared_data, images, shared, given))
        ways["eager"] = eager(work / "eager", registry, made, given, shared)
    return ways, size, lost


def eager(work: Path, registry: Registry, made: Sequence[Made], given: Options, shared: JuiceFS) -> Way:
    before, fetched, began = by_children(), shared.link.counts(registry.port).down, time.perf_counter()
    burst_eager.prepare(work, made, shared.link.ports[registry.port])
    burst_eager.run(work, made, given.containers, given.at_once)
    seconds = time.perf_counter() - began
    return Way(seconds, by_children() - before, shared.link.counts(registry.port).down - fetched)


def figures(ways: dict[str, Way], size: int, lost: Outage) -> Iterator[Figure]:
    ours, local, eager = ways["on demand"], ways["local"], ways["eager"]
    yield Figure("burst_vs_local", ours.seconds / local.seconds, "x", 1.5, "<=", "time, against layers on local disk")
    yield Figure("burst_vs_eager", eager.seconds / ours.seconds, "x", 3, ">=", "time, against fetch and unpack first")
    fewer = (1 - ours.written / eager.written) * 100
    yield Figure("burst_fewer_bytes_written", fewer, "%", 90, ">=", "on the node's disk, against eager")
    share = ours.fetched / size * 100
    yield Figure("burst_fetched", share, "%", 25, "<=", f"of {size / MIB:.0f} MiB of distinct layers")
    yield Figure("burst_fetched_vs_eager", ours.fetched / eager.fetched * 100, "%", note="eager fetches compressed")
    for name, way in ways.items():
        label = name.replace(" ", "_")
        yield Figure(f"burst_{label}_time", way.seconds, "s")
        yield Figure(f"burst_{label}_written", way.written / MIB, "MiB")
        yield Figure(f"burst_{label}_fetched", way.fetched / MIB, "MiB")
    slowest = None if None in lost.killed else max(filter(None, lost.killed), default=None)
    yield Figure("burst_outage_killed_within", slowest, "s", KILLED_WITHIN, note=f"{len(lost.killed)} ended meanwhile")
    yield Figure("burst_outage_later_creates", lost.later, "s", BACK, note=lost.said)


def main() -> None:
    given = options()
    number = fitting(given.images)
    with ExitStack() as stack:
        registry = stack.enter_context(running(burst_images.bounded()))
        made = burst_images.make(registry, RECIPES[:number], lambda line: print(line, file=sys.stderr))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="barchan-bench-burst-", dir=DISK)))
        ways, size, lost = burst(work, registry, made, given)
    least, most = min(image.size for image in made), max(image.size for image in made)
    notes = [
        f"images of {least / MIB:.0f} to {most / MIB:.0f} MiB, of which {made[0].shared / MIB:.0f} MiB are a layer that all share",
        f"the endpoint gone for {GONE:g} s: {dict(lost.ends)}; ended meanwhile after {lost.killed} s",
        machine(),
    ]
    if number < given.images:
        notes.append(f"the disk had room for {number} of {given.images} images")
    show(f"burst: {given.containers} containers over {number} images", [*figures(ways, size, lost)], notes, given.json)


if __name__ == "__main__":
    main()
