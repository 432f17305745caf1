"""A writable tree is used again when it held little: nothing of the sandbox before is in it, and a costly one is deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from barchan.backends.spawner import Place, Spawned, Spawner
from barchan.kernel import btrfs
from barchan.spec import MIB
from tests.host.spawn_site import Box, alive, end
from tests.host.test_spawner_places import Ground, ground, site, volume

__all__ = ["ground", "site", "volume"]
SMALL, LARGE = 1 * MIB, 32 * MIB
CHANGES = """
mkdir -p /a/b/c /shut; echo secret > /a/b/c/file; touch -d @1 /; chmod 500 /
ln -s / /root-of-host; ln /a/b/c/file /another; dd if=/dev/zero of=/data bs=4k count=3 2>/dev/null
for i in $(seq 100); do echo $i > "/a/$i"; done; chmod 000 /shut /a/b
"""


def spares(ground: Ground) -> set[str]:
    return {path.name for path in ground.places.trees.iterdir() if path.name.startswith(".")}


def number(tree: Path) -> int:
    fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return btrfs.subvolume_id(fd)
    finally:
        os.close(fd)


def write_out(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


async def made(ground: Ground, spawner: Spawner, name: str, size: int = LARGE) -> tuple[Spawned, Box]:
    with ground.request(name, place=Place(name, (), size)) as request:
        child = await spawner.spawn(request)
    return child, ground.box(name, child)


async def removed(spawner: Spawner, name: str, child: Spawned) -> None:
    await end(child)
    assert await spawner.remove([name]) == []


@pytest.mark.parametrize("binary", ["spawner", "spawner_sanitized"])
async def test_the_next_one_finds_nothing_of_the_one_before(ground: Ground, binary: str) -> None:
    async with ground.spawner(binary) as spawner:
        child, box = await made(ground, spawner, "first")
        before = number(box.tree)
        await box.sh(CHANGES)
        os.setxattr(box.tree / "u", "user.left", b"here")
        await removed(spawner, "first", child)
        assert spares(ground) == {".spare-0"} and not ground.traces("first")
        assert not list((ground.places.trees / ".spare-0").iterdir())

        child, box = await made(ground, spawner, "second", SMALL)
        assert number(box.tree) == before and not spares(ground), "it is the same subvolume"
        assert await alive(box) == "alive\n"
        found = sorted(str(path.relative_to(box.tree)) for path in box.tree.rglob("*") if path.name != "work")
        assert found == ["s", "u", "w"], found
        upper = (box.tree / "u").stat()
        assert (upper.st_mode & 0o777, upper.st_uid) == (0o755, 0) and upper.st_mtime > 1
        assert "user.left" not in os.listxattr(box.tree / "u")
        full = await box.run("/bin/dd", "if=/dev/urandom", "of=/big", "bs=64k", "count=32")
        assert full.code and "quota" in full.output.lower(), "its limit is its own"
        await removed(spawner, "second", child)


COSTLY = {
    "many": "mkdir /m; for i in $(seq 600); do echo > /m/$i; done",
    "deep": "i=0; while [ $i -lt 40 ]; do mkdir d; cd d; i=$((i+1)); done",
    "large": "dd if=/dev/zero of=/l bs=1M count=12",
}


@pytest.mark.parametrize("what", COSTLY)
async def test_one_that_takes_work_to_empty_is_deleted(ground: Ground, what: str) -> None:
    async with ground.spawner() as spawner:
        child, box = await made(ground, spawner, "costly")
        await box.sh(COSTLY[what])
        await removed(spawner, "costly", child)
        assert not spares(ground) and not ground.traces("costly")


async def test_what_was_freed_and_is_still_charged_is_not_the_next_ones(ground: Ground) -> None:
    async with ground.spawner() as spawner:
        child, box = await made(ground, spawner, "writer")
        await box.sh("dd if=/dev/urandom of=/written bs=1M count=4 2>/dev/null")
        write_out(box.tree / "u/written")
        await removed(spawner, "writer", child)
        assert spares(ground) == {".spare-0"}
        child, box = await made(ground, spawner, "next", SMALL)
        await box.sh("dd if=/dev/urandom of=/most bs=64k count=12")
        await removed(spawner, "next", child)


async def test_another_spawner_takes_them_up(ground: Ground) -> None:
    async with ground.spawner() as spawner:
        children = [await made(ground, spawner, name) for name in ("one", "two")]
        for name, (child, _) in zip(("one", "two"), children, strict=True):
            await removed(spawner, name, child)
    assert spares(ground) == {".spare-0", ".spare-1"}
    async with ground.spawner() as spawner:
        child, box = await made(ground, spawner, "three")
        assert spares(ground) == {".spare-1"} and await alive(box) == "alive\n"
        await removed(spawner, "three", child)
        assert spares(ground) == {".spare-0", ".spare-1"}
