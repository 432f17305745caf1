"""Containers whose place the spawner makes: what a place is, whom it belongs to, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from barchan.backends.spawner import Place, PlacedRequest, Places, Spawned, Spawner, SpawnFlag
from barchan.config import Layout
from barchan.errors import BarchanError, CreateFailed
from barchan.kernel import mounts, syscalls
from barchan.kernel.scratch import Scratch
from barchan.spec import GIB, MIB
from tests import server
from tests.host import spawn_site
from tests.host.spawn_site import GUEST_UID, NATIVE, UID_BASE, UID_COUNT, Box, Site, alive, end, ended, kill

SLOTS = 3
INSTANCE = "spawner-test"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("places")) as made:
        yield made


@pytest.fixture(scope="module")
def volume() -> Iterator[Scratch]:
    disk = next((base for base in server.disks() if shutil.disk_usage(base).free > 2 * GIB), None)
    if disk is None:
        pytest.skip("no disk with 2 GiB free")
    path = Path(tempfile.mkdtemp(prefix="barchan-places-", dir=disk))
    try:
        with Scratch.open(Layout(path), 256 * MIB) as volume:
            yield volume
    finally:
        while mounts.top(path / "scratch"):
            syscalls.unmount(path / "scratch")
        shutil.rmtree(path)


@dataclass(frozen=True)
class Ground:
    """Where places are made."""

    site: Site
    places: Places

    @contextlib.asynccontextmanager
    async def spawner(self, binary: str = "spawner") -> AsyncIterator[Spawner]:
        async with Spawner.start(NATIVE / "build" / binary, self.site.guest(), GUEST_UID, self.places) as spawner:
            yield spawner

    @contextlib.contextmanager
    def request(self, name: str, *limits: str, **changes: object) -> Iterator[PlacedRequest]:
        layer = syscalls.open_tree(self.site.layer_path, clone=True)
        try:
            given: dict[str, object] = {"layers": (layer,), "hostname": "box", "place": Place(name, limits, MIB)}
            yield PlacedRequest(**(given | changes))  # type: ignore[arg-type]
        finally:
            os.close(layer)

    async def made(self, spawner: Spawner, name: str, *limits: str) -> Spawned:
        with self.request(name, *limits) as request:
            return await spawner.spawn(request)

    def box(self, name: str, child: Spawned) -> Box:
        tree, group = self.places.trees / name, self.places.unified / name
        return Box(child, tree / "s", tree, group, group.stat().st_uid + 1 - UID_COUNT)

    def traces(self, name: str) -> set[str]:
        """Parts of a place that there are."""
        found = {parent.name for parent in (self.places.unified, *self.places.v1) if (parent / name).exists()}
        found |= {"tree"} if (self.places.trees / name).exists() else set()
        return found | {f"slot {path.name}" for path in self.places.ids.iterdir() if path.readlink().name == name}

    def slot(self, name: str) -> int:
        (slot,) = [int(path.name) for path in self.places.ids.iterdir() if path.readlink().name == name]
        return slot


@pytest.fixture
def ground(site: Site, volume: Scratch, tmp_path: Path) -> Iterator[Ground]:
    yield Ground(
        site,
        Places(
            ids=tmp_path,
            unified=site.groups,
            v1=() if site.v1 is None else (site.v1,),
            trees=volume.root,
            instance=INSTANCE,
            uid_first=UID_BASE,
            uid_size=UID_COUNT,
            slots=SLOTS,
        ),
    )
    for parent in (site.groups, *([site.v1] if site.v1 else [])):
        for group in [path for path in parent.iterdir() if path.is_dir()]:
            spawn_site.remove_group(group)
    for tree in volume.root.iterdir():
        volume.drop(tree.name)


async def wait_end(child: Spawned) -> None:
    await ended(child.pidfd)
    os.close(child.pidfd)


async def descriptors(spawner: Spawner) -> set[str]:
    """What it holds when it waits for the next request."""
    await spawner.remove(["none"])
    return set(os.listdir(f"/proc/{spawner.pid}/fd"))


def pids(ground: Ground, most: int) -> str:
    return f"{'0' if ground.places.v1 else 'v2'}/pids.max={most}"


@pytest.mark.parametrize("binary", ["spawner", "spawner_sanitized"])
async def test_it_is_made_whole_and_goes_whole(ground: Ground, binary: str) -> None:
    async with ground.spawner(binary) as spawner:
        child = await ground.made(spawner, "whole")
        box = ground.box("whole", child)
        assert await alive(box) == "alive\n"
        assert ground.traces("whole") == {
            *(parent.name for parent in (ground.places.unified, *ground.places.v1)),
            "tree",
            f"slot {ground.slot('whole')}",
        }
        assert await spawner.remove(["whole"]) == ["whole"], "what runs is not removed"
        assert await alive(box) == "alive\n"
        assert f"slot {ground.slot('whole')}" in ground.traces("whole"), "nobody else gets its ids"
        await end(child)
        assert await spawner.remove(["whole"]) == []
        assert not ground.traces("whole")


async def test_its_parts_belong_to_it(ground: Ground) -> None:
    async with ground.spawner() as spawner:
        child = await ground.made(spawner, "own")
        box = ground.box("own", child)
        base = UID_BASE + ground.slot("own") * UID_COUNT
        assert (await box.sh("cat /proc/self/uid_map")).split() == ["0", str(base), str(UID_COUNT - 1)]
        facts = Path(f"/proc/{child.pid}/status").read_text()
        guest = next(line for line in facts.splitlines() if line.startswith("Uid:")).split()[1]
        assert int(guest) == base + UID_COUNT - 1 == box.group.stat().st_uid
        for parent in (ground.places.unified, *ground.places.v1):
            assert (parent / "own").stat().st_mode & 0o777 == 0o700
            assert str(child.pid) in (parent / "own/cgroup.procs").read_text().split()
        assert {part.name: (part.stat().st_uid, part.stat().st_mode & 0o777) for part in box.tree.glob("?")} == {
            "u": (0, 0o755),
            "w": (0, 0o755),
            "s": (0, 0o755),
        }
        await box.sh("echo x > /new")
        assert (box.tree / "u/new").stat().st_uid == 0
        assert not {"s", "u", "w"} & set((await box.sh("ls -a /")).split()), "the socket is not inside"
        assert await box.sh("cat /proc/sys/net/ipv4/tcp_ehash_entries") == "128\n", (
            "its end searches no table of the host"
        )
        await end(child)


async def test_its_limits_hold(ground: Ground) -> None:
    async with ground.spawner() as spawner:
        child = await ground.made(spawner, "small", pids(ground, 20), "?v2/no.such.file=1")
        box = ground.box("small", child)
        parent = ground.places.v1[0] if ground.places.v1 else ground.places.unified
        assert (parent / "small/pids.max").read_text() == "20\n"
        full = await box.run("/bin/dd", "if=/dev/urandom", "of=/big", "bs=64k", "count=64")
        assert full.code and "quota" in full.output.lower(), full
        await end(child)


@pytest.mark.parametrize(
    ("limit", "phase"),
    [("v2/no.such.file=1", "cgroups"), ("7/pids.max=5", "cgroups"), ("v2/../x=1", "cgroups"), ("pids.max", "cgroups")],
)
async def test_a_limit_that_cannot_be_set_is_an_error(ground: Ground, limit: str, phase: str) -> None:
    async with ground.spawner() as spawner:
        await end(await ground.made(spawner, "first"))
        before = await descriptors(spawner)
        with pytest.raises(CreateFailed) as failed:
            await ground.made(spawner, "bad", limit)
        assert failed.value.phase == phase
        assert await descriptors(spawner) == before
        child = await ground.made(spawner, "good")
        assert await alive(ground.box("good", child)) == "alive\n"
        await end(child)


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "x" * 96])
async def test_a_name_that_leads_elsewhere_is_refused(ground: Ground, name: str) -> None:
    async with ground.spawner() as spawner:
        with pytest.raises(CreateFailed) as failed:
            await ground.made(spawner, name)
        assert failed.value.phase == "request"
        with pytest.raises(CreateFailed):
            await spawner.remove([name])
        assert not list(ground.places.ids.iterdir())


async def test_a_place_is_made_once(ground: Ground) -> None:
    async with ground.spawner() as spawner:
        child = await ground.made(spawner, "twice")
        with pytest.raises(CreateFailed) as failed:
            await ground.made(spawner, "twice")
        assert failed.value.phase == "disk"
        assert await alive(ground.box("twice", child)) == "alive\n"
        await end(child)


async def test_ranges_of_ids_are_held_by_one_each(ground: Ground) -> None:
    (ground.places.ids / "1").symlink_to("another/box")
    async with ground.spawner() as spawner:
        children = [await ground.made(spawner, f"n{number}") for number in range(SLOTS - 1)]
        assert [ground.slot(f"n{number}") for number in range(SLOTS - 1)] == [0, 2]
        with pytest.raises(CreateFailed) as failed:
            await ground.made(spawner, "over")
        assert failed.value.phase == "ids" and failed.value.hint
        for child in children:
            await end(child)
        assert await spawner.remove(["n0", "never-was", "n1"]) == ["never-was"]
        assert [path.name for path in ground.places.ids.iterdir()] == ["1"]


async def test_a_parked_one_gets_the_limits_of_its_order(ground: Ground) -> None:
    async with ground.spawner() as spawner:
        park = PlacedRequest(place=Place("parked", (pids(ground, 9),), MIB), flags=SpawnFlag.PARK)
        parked = await spawner.park(park)
        place = Place("parked", (pids(ground, 30),), 4 * MIB)
        with ground.request("parked", place=place, parked=parked.order) as request:
            child = await spawner.spawn(request)
        os.close(parked.pidfd)
        assert child.pid == parked.pid
        box = ground.box("parked", child)
        assert (await box.run("/bin/dd", "if=/dev/zero", "of=/two", "bs=1M", "count=2")).code == 0
        parent = ground.places.v1[0] if ground.places.v1 else ground.places.unified
        assert (parent / "parked/pids.max").read_text() == "30\n"
        await end(child)
        assert await spawner.remove(["parked"]) == []


async def test_parked_ones_end_with_the_spawner(ground: Ground) -> None:
    async with ground.spawner() as spawner:
        parked = await spawner.park(PlacedRequest(place=Place("left", (), MIB), flags=SpawnFlag.PARK))
    await asyncio.wait_for(wait_end(parked), 10)
    assert ground.traces("left"), "for whoever sweeps"


async def test_many_at_once_and_their_removal_in_one_message(ground: Ground) -> None:
    async with ground.spawner() as spawner:
        for _ in range(3):
            children = await asyncio.gather(*(ground.made(spawner, f"m{number}") for number in range(SLOTS)))
            for child in children:
                kill(child)
                await wait_end(child)
            assert await spawner.remove([f"m{number}" for number in range(SLOTS)]) == []


async def test_without_directories_there_are_no_places(site: Site, ground: Ground) -> None:
    async with site.spawner() as spawner:
        with pytest.raises(CreateFailed) as failed:
            await ground.made(spawner, "none")
        assert failed.value.phase == "request"
        with pytest.raises(BarchanError):
            await spawner.remove(["none"])
