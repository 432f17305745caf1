"""Directories of the host in a container: made at once or from a parked child, they can be read and nothing else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from barchan.backends.spawner import ParkRequest, Spawner, SpawnFlag, SpawnRequest
from barchan.errors import CreateFailed
from barchan.kernel import syscalls, views
from tests.host import spawn_site
from tests.host.spawn_site import Box, Site, end

WAYS = pytest.mark.parametrize("parked", [False, True], ids=["at-once", "parked"])
KERNELS = pytest.mark.parametrize("flags", [SpawnFlag(0), SpawnFlag.REDUCED], ids=["by-fd", "reduced"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("data")) as made:
        yield made


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    root = tmp_path / "shared"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    (tmp_path / "nothing").mkdir()
    (root / "file").write_text("of the host\n")
    (root / "file").chmod(0o666)
    return root


@contextlib.contextmanager
def viewed(shared: Path, *targets: str) -> Iterator[tuple[tuple[int, str], ...]]:
    with contextlib.ExitStack() as stack:
        data = []
        for target in targets:
            fd = views.view(shared, shared.with_name("nothing"))
            stack.callback(os.close, fd)
            data.append((fd, target))
        yield tuple(data)


async def spawned(spawner: Spawner, request: SpawnRequest, parked: bool) -> spawn_site.Spawned:
    if not parked:
        return await spawner.spawn(request)
    child = await spawner.park(
        ParkRequest(
            uid_base=request.uid_base, uid_count=request.uid_count, cgroup=request.cgroup, groups=request.groups
        )
    )
    os.close(child.pidfd)
    return await spawner.spawn(replace(request, parked=child.order))


@contextlib.asynccontextmanager
async def boxed(site: Site, shared: Path, *targets: str, flags: SpawnFlag, parked: bool) -> AsyncIterator[Box]:
    with viewed(shared, *targets) as data, site.request(flags=flags, data=data) as (request, path, tree, group):
        async with site.spawner() as spawner:
            child = await spawned(spawner, request, parked)
            try:
                yield Box(child, path, tree, group, request.uid_base)
            finally:
                await end(child)


@WAYS
@KERNELS
async def test_it_is_there_and_only_read(site: Site, shared: Path, flags: SpawnFlag, parked: bool) -> None:
    async with boxed(site, shared, "/data", "/deep/er/data", flags=flags, parked=parked) as box:
        assert await box.sh("cat /data/file /deep/er/data/file") == "of the host\n" * 2
        for attack in ("echo x > /data/file", "touch /data/new", "rm /data/file", "chmod 0 /data/file"):
            assert (await box.run("/bin/sh", "-c", attack)).code != 0, attack
        assert (box.tree / "u/deep/er").stat().st_uid == 0, "made as the sandbox's root's own"
    assert [path.name for path in shared.iterdir()] == ["file"]


@WAYS
async def test_all_capabilities_are_not_enough(site: Site, shared: Path, parked: bool) -> None:
    async with boxed(site, shared, "/data", flags=SpawnFlag.ALL_CAPS, parked=parked) as box:
        for attack in (
            "mount -o remount,rw /data",
            "mount -o remount,bind,rw /data",
            "umount /data",
            "echo x > /data/file",
            "touch /data/new",
        ):
            assert (await box.run("/bin/sh", "-c", attack)).code != 0, attack
        assert await box.sh("cat /data/file") == "of the host\n"


def test_without_its_flags_a_view_is_still_read_only(shared: Path) -> None:
    """What protects it when everything around it fails: there is no layer to write to."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    with viewed(shared, "/") as ((fd, _),):
        syscalls.set_mount_attributes(fd, remove=syscalls.ATTR_RDONLY)
        for path in (f"/proc/self/fd/{fd}/new", f"/proc/self/fd/{fd}/file"):
            with pytest.raises(OSError, match="Read-only"):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT))


@WAYS
@pytest.mark.parametrize("target", ["/proc/x", "/bin/busybox/x", "/dev/shm/x"])
async def test_a_target_that_cannot_be_ends_the_making(site: Site, shared: Path, target: str, parked: bool) -> None:
    with pytest.raises(CreateFailed) as failed:
        async with boxed(site, shared, target, flags=SpawnFlag(0), parked=parked):
            pass
    assert failed.value.phase == "data-mount"


@pytest.mark.parametrize("target", ["", "/", "relative", "//x"])
async def test_the_spawner_takes_no_odd_targets(site: Site, shared: Path, target: str) -> None:
    with pytest.raises(CreateFailed) as failed:
        async with boxed(site, shared, target, flags=SpawnFlag(0), parked=False):
            pass
    assert failed.value.phase == "request"
