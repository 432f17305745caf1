"""An open network in a sandbox as the spawner makes it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from barchan.kernel import netns
from tests.host import spawn_site
from tests.host.net_site import FIRST, HOST, METADATA, PORT, SERVER, World, address, gateway, open_world
from tests.host.spawn_site import Box, Site

NC = "/bin/busybox nc -w 2"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("network")) as made:
        yield made


@pytest.fixture
def world() -> Iterator[World]:
    with open_world() as made:
        made.prepare()
        yield made


def attach(world: World, box: Box) -> None:
    fd = netns.of_process(box.child.pidfd)
    try:
        world.devices.attach(fd, FIRST)
    finally:
        os.close(fd)


@pytest.mark.parametrize("uid", [0, 1000])
async def test_programs_reach_the_outside_and_not_the_host(site: Site, world: World, uid: int) -> None:
    listener = world.outside.listen(SERVER, PORT)
    world.host.listen("0.0.0.0", PORT)
    async with site.spawner() as spawner, site.box(spawner) as box:
        attach(world, box)
        asked = asyncio.create_task(box.sh(f"{NC} {SERVER} {PORT} < /dev/null", uid))
        served, peer = await asyncio.to_thread(listener.accept)
        with served:
            served.sendall(b"hello")
        assert (await asked, peer[0]) == ("hello", HOST)
        for at in (HOST, gateway(FIRST), METADATA):
            refused = await box.run("/bin/sh", "-c", f"{NC} {at} {PORT} < /dev/null 2>&1", uid=uid)
            assert refused.code and "No route to host" in refused.output


async def test_root_inside_changes_nothing_of_it(site: Site, world: World) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        attach(world, box)
        assert (
            "Operation not permitted" in (await box.run("/bin/sh", "-c", "/bin/busybox ifconfig eth0 down 2>&1")).output
        )
        shown = await box.sh("/bin/busybox ifconfig eth0")
        assert f"inet addr:{address(FIRST)}" in shown and "UP" in shown


async def test_the_device_goes_with_the_sandbox(site: Site, world: World) -> None:
    async with site.spawner() as spawner:
        async with site.box(spawner) as box:
            attach(world, box)
            assert world.slots() == {FIRST}
        async with asyncio.timeout(10):
            while world.slots():
                await asyncio.sleep(0)
