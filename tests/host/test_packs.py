"""Packing beside the event loop: whatever is given up, killed or full, no half of it stays, and others go on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from barchan.backends import packs as module
from barchan.backends.base import Pack
from barchan.backends.packs import Packs, stack_of
from barchan.config import Layout
from barchan.errors import (
    BarchanError,
    CreateFailed,
    EnvironmentNotFound,
    InvalidRequest,
    NodeStorageFull,
    NotSupported,
    SandboxUnavailable,
)
from barchan.images import ImageConfig
from barchan.kernel import processes
from barchan.kernel.scratch import Scratch
from barchan.layers.mount import LayerMounts
from barchan.layers.sources import import_layer
from barchan.layers.store import Layer, LayerStore
from barchan.packing import PackOrder, ScrubRules
from barchan.spec import MIB, EnvironmentRef, SandboxSpec
from tests.disks import small_disk

SPEC = SandboxSpec(environment=EnvironmentRef(base="base@1"))


class Site:
    """A volume with the trees of sandboxes, and a store of layers beside it."""

    def __init__(self, root: Path, scratch: Scratch, store: LayerStore) -> None:
        self.root, self.scratch, self.store = root, scratch, store
        self.mounts = LayerMounts(root / "mnt", store)
        self.base = self.imported("one")
        self.ends = False
        """As soon as a sandbox is frozen."""

    def imported(self, content: str) -> Layer:
        tree = self.root / f"tree-{content}"
        (tree / "etc").mkdir(parents=True)
        (tree / "etc/file").write_text(content)
        return import_layer(self.store, "base", tree)

    def changed(self, sandbox: str, size: int = 1000) -> Path:
        """The file that changes made."""
        file = self.scratch.make(sandbox, 256 * MIB).path / "u/file"
        file.write_bytes(os.urandom(size))
        return file

    def still(self) -> None:
        if self.ends and list(self.scratch.root.glob(".frozen-*")):
            raise SandboxUnavailable("it has ended")

    def clean(self) -> bool:
        return not [*self.scratch.root.glob(".frozen-*"), *(self.store.root / "tmp").iterdir()]


@pytest.fixture
def site(disk: Path) -> Iterator[Site]:
    with Scratch.open(Layout(disk), 512 * MIB) as scratch:
        site = Site(disk, scratch, LayerStore(disk / "layers"))
        site.mounts.prepare()
        yield site
        site.mounts.unmount_all()


@pytest.fixture
async def packs(site: Site) -> AsyncIterator[Packs]:
    packs = Packs(site.scratch, site.store, site.mounts.root, 2, reduced=False)
    yield packs
    await packs.close()
    assert site.clean()


def request(sandbox: str, name: str = "made", **order: Any) -> Pack:
    return Pack(id=sandbox, spec=SPEC, key="k", order=PackOrder(name=name, **order))


async def packed(packs: Packs, site: Site, wanted: Pack) -> Any:
    return await packs.pack(wanted, wanted.id, stack_of([site.base]), site.still)


async def until(site: Site, true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.001)


async def test_one_process_serves_many_and_goes_when_it_is_not_needed(
    packs: Packs, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.changed("s1")
    for number in range(3):
        assert (await packed(packs, site, request("s1", f"made-{number}"))).version == 1
    (pid,) = processes_of(site)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.01)
    await packed(packs, site, request("s1", "last"))
    await until(site, lambda: not processes_of(site) and not Path(f"/proc/{pid}").exists())
    await packed(packs, site, request("s1", "another"))


def processes_of(site: Site) -> list[int]:
    """Of ours, those that pack."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if b"pack_worker" in line and f"\nPPid:\t{os.getpid()}\n" in (entry / "status").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("stage", ["frozen", "made"])
async def test_what_is_given_up_leaves_nothing(packs: Packs, site: Site, stage: str) -> None:
    site.changed("s1", 64 * MIB)
    signs: dict[str, Callable[[], object]] = {
        "frozen": lambda: list(site.scratch.root.glob(".frozen-*")),
        "made": lambda: list((site.store.root / "tmp").glob("*/layer/image")),
    }
    task = asyncio.ensure_future(packed(packs, site, wanted := request("s1")))
    await until(site, signs[stage])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(site, site.clean)
    assert await packs.packed(wanted) is None and not site.store.catalog.versions("made")
    assert (await packed(packs, site, wanted)).version == 1


class Held(Scratch):
    """Freezes only when it is let."""

    begun, gate = threading.Event(), threading.Event()

    def _freeze(self, sandbox: str, taken: str, stage: str) -> None:
        self.begun.set()
        assert self.gate.wait(20)
        super()._freeze(sandbox, taken, stage)


async def test_what_is_given_up_while_it_is_frozen_is_thawed(site: Site) -> None:
    held = Held(site.scratch.root, mounted=False)
    packs = Packs(held, site.store, site.mounts.root, 2, reduced=False)
    site.changed("s1")
    task = asyncio.ensure_future(packed(packs, site, request("s1")))
    assert await asyncio.to_thread(held.begun.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.gate.set()
    await packs.close()
    held.release()
    assert site.clean()


async def test_a_killed_process_is_an_error_and_another_is_started(packs: Packs, site: Site) -> None:
    site.changed("s1", 64 * MIB)
    task = asyncio.ensure_future(packed(packs, site, request("s1")))
    await until(site, lambda: list((site.store.root / "tmp").iterdir()))
    (pid,) = processes_of(site)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CreateFailed, match="was killed"):
        await task
    await until(site, site.clean)
    assert (await packed(packs, site, request("s1"))).version == 1


async def test_one_that_died_while_it_waited_is_replaced(packs: Packs, site: Site) -> None:
    site.changed("s1")
    await packed(packs, site, request("s1"))
    (pid,) = processes_of(site)
    os.kill(pid, signal.SIGKILL)
    await until(site, lambda: processes.start_time(pid) == 0 or not Path(f"/proc/{pid}").exists())
    assert (await packed(packs, site, request("s1", "other"))).version == 1


async def test_what_ended_while_it_was_frozen_is_no_layer(packs: Packs, site: Site) -> None:
    """Its files may have been half removed by then."""
    site.changed("s1")
    site.ends = True
    with pytest.raises(SandboxUnavailable):
        await packed(packs, site, request("s1"))
    assert site.clean() and not site.store.catalog.versions("made")


async def test_what_is_gone_says_so(packs: Packs, site: Site) -> None:
    with pytest.raises(CreateFailed) as failed:
        await packed(packs, site, request("never"))
    assert failed.value.phase == "scratch"


async def test_twice_at_once_and_others_beside_it(packs: Packs, site: Site) -> None:
    for sandbox in ("s1", "s2", "s3"):
        site.changed(sandbox, MIB)
    wanted = [request(sandbox, f"{sandbox}-{n}") for sandbox in ("s1", "s2", "s3") for n in range(2)]
    made = await asyncio.gather(*(packed(packs, site, one) for one in wanted))
    assert [one.sandbox for one in made] == ["s1", "s1", "s2", "s2", "s3", "s3"]
    assert len({one.digest for one in made}) == 3 and made[0].digest == made[1].digest
    assert len(processes_of(site)) <= 2


async def test_a_full_store_is_named_and_stays_clean(disk: Path, site: Site) -> None:
    os.close(site.mounts.acquire(site.base))
    with small_disk(disk / "small", "100m") as place:
        site.store = LayerStore(place / "layers")
        shutil.copytree(site.base.path, site.store.layer_path(site.base.digest))
        packs = Packs(site.scratch, site.store, site.mounts.root, 1, reduced=False)
        file = site.changed("s1", 64 * MIB)
        with pytest.raises(NodeStorageFull):
            await packed(packs, site, request("s1"))
        assert site.clean() and not site.store.catalog.versions("made")
        file.write_bytes(b"less")
        assert (await packed(packs, site, request("s1"))).version == 1
        await packs.close()


async def test_an_image_of_names_that_mean_something_else_is_refused(packs: Packs, site: Site) -> None:
    site.changed("s1")
    old = stack_of([site.base])
    site.store.remove("base")
    site.imported("two")
    with pytest.raises(EnvironmentNotFound) as refused:
        await packs.pack(request("s1", whole=True), "s1", old, site.still)
    assert refused.value.field == "config"
    config = ImageConfig(env={"A": "b"}, user="ann")
    made = await packs.pack(request("s1", whole=True, config=config), "s1", old, site.still)
    assert site.store.resolve(made.digest).config == config
    assert [layer.digest for layer in site.store.resolve("made").below] == [site.base.digest]


async def test_a_layer_that_was_removed_is_named(packs: Packs, site: Site) -> None:
    (site.changed("s1").parent / "etc").mkdir()
    site.store.discard(site.base.digest)
    with pytest.raises(EnvironmentNotFound, match=site.base.digest):
        await packed(packs, site, request("s1"))


@pytest.mark.parametrize(
    ("layers", "order", "kind", "field"),
    [
        (100, {"whole": True}, InvalidRequest, "whole"),
        (0, {}, NotSupported, "sandbox"),
        (1, {"scrub": ScrubRules(also=("../x",))}, InvalidRequest, "scrub.also"),
    ],
)
async def test_what_cannot_be_packed_is_refused(
    packs: Packs, site: Site, layers: int, order: dict[str, Any], kind: type[BarchanError], field: str
) -> None:
    site.changed("s1")
    with pytest.raises(kind) as refused:
        await packs.pack(request("s1", **order), "s1", stack_of([site.base] * layers), site.still)
    assert refused.value.field == field


def test_what_a_killed_agent_left_frozen_goes(site: Site) -> None:
    site.changed("s1")
    frozen = site.scratch.frozen("s1")
    frozen.__enter__()
    assert not site.clean()
    site.scratch.thaw()
    assert site.clean() and site.scratch.list() == {"s1"}
