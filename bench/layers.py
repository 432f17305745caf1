"""What layers cost: python -m bench.layers [--json] [-n N]

Mounting a converted stack of 20 layers for a new sandbox, when they are mounted already and when this is their first use on
the host (N rounds each); packing the changes of a running sandbox, through the SDK; starting a store that knows 1,000 layers, 300 of
them mounted; converting an image, beside umoci and tar unpacking the same.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from barchan import Client, Limits
from barchan.kernel import syscalls
from barchan.layers import content, erofs
from barchan.layers.attach import attach
from barchan.layers.bootstrap import bootstrap
from barchan.layers.mount import LayerMounts
from barchan.layers.sources import import_environment
from barchan.layers.stack import compose
from barchan.layers.store import LayerStore
from barchan.spec import EnvironmentRef
from bench.figures import Figure, show, spread
from bench.rig import GIB, MIB, Rig, machine, options, rig
from tests.images import Layout, file, tar

LAYERS = 20
KNOWN, MOUNTED = 1000, 300
FILES = 100
"""Of `CHANGED` bytes together."""
CHANGED = 100 * MIB
LIMITS = Limits(memory=256 * MIB, pids=64, disk=GIB)
WRITE = f"for i in $(seq {FILES}); do dd if=/dev/urandom of=/root/$i bs=1M count={CHANGED // FILES // MIB} 2>/dev/null || exit 1; done"
PACKS = 5
Sample = dict[str, list[float]]


@contextmanager
def timed(sample: Sample, name: str) -> Iterator[None]:
    """Adds milliseconds; as `<name>.cpu` those that this process computed."""
    began, computed = time.perf_counter(), time.process_time()
    yield
    sample.setdefault(f"{name}.cpu", []).append((time.process_time() - computed) * 1e3)
    sample.setdefault(name, []).append((time.perf_counter() - began) * 1e3)


def mounting(work: Path, n: int, sample: Sample) -> None:
    """From the name to a mounted overlay with a fresh upper directory; milliseconds."""
    layout, store = Layout(work / "stack"), LayerStore(work / "mounting/layers")
    layout.add("20", [tar([file(f"d{number}/f", b"%d" % number)]) for number in range(LAYERS)])
    import_environment(store, "stack", work / "stack")
    mounts = LayerMounts(work / "mounting/mnt", store)
    mounts.prepare()
    try:
        for number in range(n):
            with timed(sample, "first"):
                overlay(work / f"mounting/first-{number}", store, mounts)
            with timed(sample, "again"):
                overlay(work / f"mounting/again-{number}", store, mounts)
            mounts.close(mounts.mounted())
    finally:
        mounts.unmount_all()


def overlay(place: Path, store: LayerStore, mounts: LayerMounts) -> None:
    for part in ("u", "w"):
        (place / part).mkdir(parents=True)
    with ExitStack() as stack:
        found: list[syscalls.Option] = []
        for layer in compose(EnvironmentRef(base="stack"), store.resolve).layers:
            found.append(("lowerdir+", mounts.acquire(layer)))
        for key, part in (("upperdir", "u"), ("workdir", "w")):
            found.append((key, os.open(place / part, os.O_DIRECTORY | os.O_RDONLY)))
        for _, fd in found:
            stack.callback(os.close, int(str(fd)))
        os.close(syscalls.new_mount("overlay", [*found, ("volatile", None)]))


async def packing(bench: Rig, sample: Sample) -> None:
    """Of nothing, and of files that were written a moment ago; milliseconds at the client."""
    async with Client(data=bench.data) as client, await client.create("tiny", limits=LIMITS) as sandbox:
        for number in range(PACKS):
            with timed(sample, "nothing"):
                await sandbox.pack_diff(f"nothing-{number}")
        for number in range(PACKS):
            (await sandbox.run(WRITE, timeout=120)).check()
            with timed(sample, "changed"):
                await sandbox.pack_diff(f"changed-{number}")


def starting(work: Path, sample: Sample) -> None:
    """A store that is opened, swept and listed, and the mounts found again; milliseconds."""
    root = work / "starting"
    store = LayerStore(root / "layers")
    layers = [one_file(store, root, number) for number in range(KNOWN)]
    mounts = LayerMounts(root / "mnt", store)
    mounts.prepare()
    try:
        for layer in layers[:MOUNTED]:
            os.close(mounts.acquire(store.resolve(layer)))
        for _ in range(PACKS):
            with timed(sample, "start"):
                again = LayerStore(root / "layers")
                again.sweep()
                known, reached = again.digests(), again.reached()
                found = LayerMounts(root / "mnt", again)
                found.prepare()
                mounted = found.mounted()
            assert (len(known), len(reached), len(mounted)) == (KNOWN, KNOWN, MOUNTED)
    finally:
        mounts.unmount_all()


def one_file(store: LayerStore, root: Path, number: int) -> str:
    tree = root / "tree"
    tree.mkdir(exist_ok=True)
    (tree / "f").write_text(str(number))
    with store.temporary() as place:
        erofs.build(tree, place / "layer")
        store.add(place / "layer", f"layer-{number}")
    return f"layer-{number}"


def converting(work: Path, sample: Sample) -> int:
    """The same image three ways, in seconds of CPU and of time. Returns the bytes of its tar."""
    store = LayerStore(work / "converting/layers")
    base = bootstrap(store, "debian-12").path
    fd = attach(base / content.IMAGE, base / content.DATA)
    try:
        command = ["tar", "-C", f"/proc/self/fd/{fd}", "--numeric-owner", "--sort=name", "-cf", str(work / "tar"), "."]
        subprocess.run(command, check=True, pass_fds=[fd])
    finally:
        os.close(fd)
    layout, archive = Layout(work / "image"), work / "tar"
    layout.add("1", [archive.read_bytes()], way="")
    ways: dict[str, Callable[[], object]] = {
        "barchan": lambda: import_environment(store, "image", work / "image"),
        "umoci": lambda: run("umoci", "raw", "unpack", "--image", f"{work}/image:1", str(work / "umoci")),
        "tar": lambda: run("tar", "-C", str(work / "unpacked"), "--numeric-owner", "-xpf", str(archive)),
    }
    (work / "unpacked").mkdir()
    for name, way in ways.items():
        before, began = computed(), time.perf_counter()
        way()
        os.sync()
        sample[name] = [time.perf_counter() - began, computed() - before]
    return archive.stat().st_size


def computed() -> float:
    """Seconds of CPU of this process and of those that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def figures(sample: Sample, size: int) -> Iterator[Figure]:
    rate = {name: size / MIB / sample[name][0] for name in ("barchan", "umoci", "tar")}
    yield Figure("convert_vs_umoci", rate["barchan"] / rate["umoci"], "x", note="rates, each with a sync")
    yield Figure("convert_vs_tar", rate["barchan"] / rate["tar"], "x")
    yield Figure("convert_cpu_vs_umoci", sample["umoci"][1] / sample["barchan"][1], "x", note="CPU seconds")
    for name in ("again", "first", "start"):
        yield Figure(
            f"{name}_cpu_p50", spread(sample[f"{name}.cpu"]).p50, "ms", note="of CPU, which a busy host does not change"
        )
    yield Figure("mount_20_layers_p50", spread(sample["again"]).p50, "ms", 5, note="mounted on the host already")
    yield Figure("mount_20_layers_first_p50", spread(sample["first"]).p50, "ms", 5, note="first use on the host")
    yield Figure("pack_diff_100_mb_p50", spread(sample["changed"]).p50, "ms", 1000, note="through the SDK")
    yield Figure("pack_diff_nothing_p50", spread(sample["nothing"]).p50, "ms", 50, note="through the SDK")
    yield Figure("store_start", spread(sample["start"]).high, "ms", 1000, note=f"{KNOWN} known, {MOUNTED} mounted")
    for name, value in rate.items():
        yield Figure(f"convert_{name}", value, "MiB/s", note=f"{sample[name][1]:.2f} s of CPU")


def main() -> None:
    given, sample = options(50), Sample()
    with rig("2g") as bench:
        mounting(bench.work, given.n, sample)
        asyncio.run(packing(bench, sample))
        starting(bench.work, sample)
        size = converting(bench.work, sample)
    of = ("first", "again", "nothing", "changed", "start")
    notes = [f"{name}: {spread(sample[name]).text()} ms" for name in of]
    show("layers", [*figures(sample, size)], [*notes, machine()], given.json)


if __name__ == "__main__":
    main()
