"""Containers in two requests: a child is parked, then ordered. Nothing of it may differ from one made at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from barchan.backends.spawner import NO_FLAGS, ParkRequest, Spawned, Spawner, SpawnFlag, SpawnRequest
from barchan.errors import CreateFailed
from tests.host import spawn_site
from tests.host.spawn_site import Box, Site, alive, end, ended, kill

BOTH_WAYS = pytest.mark.parametrize("flags", [NO_FLAGS, SpawnFlag.REDUCED], ids=["by-fd", "reduced"])
SHOW = """id; hostname; cat /proc/self/uid_map /proc/self/cgroup; grep -E 'Cap|NoNew|Seccomp' /proc/self/status
    ls /proc/self/fd /sys/class/net /dev /dev/pts; cat /proc/keys /proc/kmsg /proc/sys/user/max_net_namespaces
    ls -l /sys/fs /sys/firmware"""
MOUNTS = "cat /proc/self/mountinfo"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("parked")) as made:
        yield made


def parking(request: SpawnRequest) -> ParkRequest:
    return ParkRequest(
        uid_base=request.uid_base, uid_count=request.uid_count, cgroup=request.cgroup, groups=request.groups
    )


@contextlib.asynccontextmanager
async def ordered(site: Site, spawner: Spawner, flags: SpawnFlag = NO_FLAGS, **changes: str) -> AsyncIterator[Box]:
    with site.request(flags=flags, **changes) as (request, path, tree, group):
        parked = await spawner.park(parking(request))
        child = await spawner.spawn(replace(request, parked=parked.order))
        assert child.pid == parked.pid
        os.close(parked.pidfd)
        try:
            yield Box(child, path, tree, group, request.uid_base)
        finally:
            await end(child)


async def seen(box: Box) -> tuple[str, list[list[str]]]:
    """What it looks like from inside, without the numbers of its own."""
    mounts = [line.split() for line in (await box.sh(MOUNTS)).splitlines()]
    return (await box.sh(SHOW)).replace(str(box.uid_base), "BASE"), sorted(mount[3:] for mount in mounts)


def descriptors(pid: int) -> set[str]:
    return {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}


@BOTH_WAYS
async def test_an_ordered_child_is_like_one_made_at_once(site: Site, flags: SpawnFlag) -> None:
    async with site.spawner() as spawner:
        async with site.box(spawner, flags, hostname="same") as fresh:
            expected = await seen(fresh)
        async with ordered(site, spawner, flags, hostname="same") as box:
            assert await seen(box) == expected
            await box.sh("echo x > /new; test -c /dev/null; test -w /dev/shm")
            assert (box.tree / "u" / "new").stat().st_uid == 0


async def test_the_order_decides_flags_and_host_name(site: Site) -> None:
    async with site.spawner() as spawner, ordered(site, spawner, SpawnFlag.SETUID, hostname="ordered") as box:
        assert await box.sh("hostname; grep NoNewPrivs /proc/self/status") == "ordered\nNoNewPrivs:\t0\n"


async def test_a_parked_child_waits_inside_its_groups_and_holds_nothing_of_others(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner):
        with site.request() as (request, _, _, group), site.request() as (other, *_):
            first, second = await spawner.park(parking(request)), await spawner.park(parking(other))
            assert (group / "cgroup.procs").read_text().split() == [str(first.pid)]
            for child in (first, second):
                assert len([name for name in descriptors(child.pid) if name.startswith("socket:")]) == 1
                await end(child)


async def test_parked_children_end_with_the_spawner(site: Site) -> None:
    async with site.spawner() as spawner:
        with contextlib.ExitStack() as stack:
            requests = [stack.enter_context(site.request())[0] for _ in range(4)]
            parked = [await spawner.park(parking(request)) for request in requests]
            os.kill(spawner.pid, signal.SIGKILL)
            for child in parked:
                await ended(child.pidfd)
                os.close(child.pidfd)


async def test_a_child_is_ordered_once(site: Site) -> None:
    async with site.spawner() as spawner, ordered(site, spawner) as box:
        with site.request() as (request, *_):
            for order in (box.child.order, 77777):
                with pytest.raises(CreateFailed) as failure:
                    await spawner.spawn(replace(request, parked=order))
                assert failure.value.phase == "parked"
        assert await alive(box) == "alive\n"


async def test_a_parked_child_that_died_is_refused_and_the_next_is_made(site: Site) -> None:
    async with site.spawner() as spawner:
        with site.request() as (request, *_):
            parked = await spawner.park(parking(request))
            kill(parked)
            await ended(parked.pidfd)
            os.close(parked.pidfd)
            with pytest.raises(CreateFailed):
                await spawner.spawn(replace(request, parked=parked.order))
        async with ordered(site, spawner) as box:
            assert await alive(box) == "alive\n"


async def test_a_failed_order_ends_the_child(site: Site) -> None:
    async with site.spawner() as spawner:
        with site.request() as (request, *_):
            parked = await spawner.park(parking(request))
            with pytest.raises(CreateFailed) as failure:
                await spawner.spawn(replace(request, parked=parked.order, layers=(request.writable,)))
            assert failure.value.phase
            await ended(parked.pidfd)
            os.close(parked.pidfd)


async def test_only_so_many_are_parked(site: Site) -> None:
    most = 64
    async with site.spawner() as spawner:
        with contextlib.ExitStack() as stack:
            requests = [stack.enter_context(site.request())[0] for _ in range(most + 2)]
            made = await asyncio.gather(*(spawner.park(parking(r)) for r in requests), return_exceptions=True)
            refused = [error for error in made if isinstance(error, CreateFailed)]
            assert [error.phase for error in refused] == ["parked", "parked"]
            for child in made:
                if isinstance(child, Spawned):
                    await end(child)
