"""What a node keeps of open networks: made for a sandbox, restored when somebody removes it, found again by the next agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from barchan.backends.container_net import OpenNetwork
from barchan.config import Layout, NetworkAccess, NodeConfig
from barchan.errors import CreateFailed, FeatureMissing
from barchan.kernel import netns
from barchan.kernel.idranges import IdRanges
from barchan.networks import NetworkInfo
from tests.host.net_site import FIRST, HOST, INSTALLATION, NAMESERVER, ROUTER, SECOND, SERVER, World, open_world
from tests.host.test_net_devices import process_in_its_own_namespaces
from tests.netns import Namespace, source
from tests.rig import pause, within

SLOTS = {"one": FIRST, "two": SECOND}


@pytest.fixture
def world() -> Iterator[World]:
    with open_world() as made:
        yield made


@pytest.fixture
def ranges(tmp_path: Path) -> IdRanges:
    made = IdRanges(tmp_path / "ids", INSTALLATION.instance, 100)
    made.prepare()
    return made


class Node:
    """The part of a node that is about networks, in `world.host`."""

    def __init__(self, world: World, ranges: IdRanges, data: Path) -> None:
        access = NetworkAccess(nameservers=(IPv4Address(NAMESERVER),), watch_seconds=0.02)
        self.told: list[NetworkInfo] = []
        config = NodeConfig(layout=Layout(data), name="n", network=access)
        self.network = OpenNetwork(config, ranges, self.slot, self.told.append)
        with world.host.inside():
            self.network.remove("nothing")  # its thread begins where it stays

    def slot(self, place: str) -> int:
        if place not in SLOTS:
            raise FileNotFoundError(place)
        return SLOTS[place]


@contextlib.asynccontextmanager
async def opened(world: World, ranges: IdRanges, data: Path) -> AsyncIterator[Node]:
    node = Node(world, ranges, data)
    await node.network.open()
    try:
        yield node
    finally:
        await node.network.close()
        with world.host.inside():
            node.network.purge()


@pytest.fixture
async def node(world: World, ranges: IdRanges, tmp_path: Path) -> AsyncIterator[Node]:
    async with opened(world, ranges, tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def watching(node: Node) -> AsyncIterator[None]:
    task = asyncio.create_task(node.network.watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def pidfd() -> Iterator[int]:
    with process_in_its_own_namespaces() as made:
        yield made


def reaches(world: World, pidfd: int) -> bool:
    with contextlib.ExitStack() as undo:
        box = Namespace(undo, netns.of_process(pidfd))
        receiver = world.outside.receive(SERVER, 0)
        box.send(SERVER, receiver.getsockname()[1])
        return source(receiver) == HOST


async def until(holds: Callable[[], object]) -> None:
    async with within(20):
        while not holds():
            await pause()


async def test_it_is_tried_before_it_is_made(world: World, node: Node) -> None:
    assert node.told == [NetworkInfo(open=True)]
    assert not world.forwarding() and not world.host.run("nft list ruleset")
    await node.network.ready()
    assert world.walled() and "up0" in world.forwarding()
    assert node.network.resolv_conf == f"nameserver {NAMESERVER}\n".encode()


async def test_a_device_for_a_sandbox_and_none_after_it(world: World, node: Node, pidfd: int) -> None:
    await node.network.ready()
    await node.network.attach("one", pidfd)
    assert world.slots() == {FIRST} and reaches(world, pidfd)
    for _ in range(2):
        await node.network.release(["one", "never made"])
        assert not world.slots()


@pytest.fixture
def ended() -> Iterator[int]:
    """The pidfd of a process that is gone."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    pidfd = os.pidfd_open(pid)
    os.waitpid(pid, 0)
    yield pidfd
    os.close(pidfd)


async def test_a_sandbox_that_ended_meanwhile(world: World, node: Node, ended: int) -> None:
    await node.network.ready()
    with pytest.raises(CreateFailed) as caught:
        await node.network.attach("one", ended)
    assert caught.value.phase == "network"
    await node.network.release(["one"])
    assert not world.slots()


async def test_a_device_that_somebody_removed_comes_back(world: World, node: Node, pidfd: int) -> None:
    await node.network.ready()
    await node.network.attach("one", pidfd)
    async with watching(node):
        world.host.run(f"ip link delete {INSTALLATION.link(FIRST).name}")
        await until(world.slots)
        await until(lambda: reaches(world, pidfd))


async def test_the_packet_filter_comes_back(world: World, node: Node) -> None:
    await node.network.ready()
    async with watching(node):
        world.host.run("nft flush ruleset")
        await until(world.walled)
    with world.host.inside():
        node.network.purge()
    assert not world.forwarding(), "what was turned on is still known"


async def test_a_network_that_the_host_joins_is_closed(world: World, node: Node) -> None:
    await node.network.ready()
    async with watching(node):
        world.host.run("ip address add 192.0.2.1/24 dev in0")
        await until(lambda: "192.0.2.0/24" in world.table())


async def test_the_next_agent_keeps_what_lives_and_removes_the_rest(
    world: World, ranges: IdRanges, tmp_path: Path, pidfd: int
) -> None:
    world.attach()
    world.devices.attach(Namespace(world.undo).fd, 9)
    (ranges.directory / str(FIRST)).symlink_to(f"{ranges.instance}/one")
    (ranges.directory / str(SECOND)).symlink_to(f"{ranges.instance}/two")
    async with opened(world, ranges, tmp_path) as node:
        assert world.slots() == {FIRST, SECOND}
        await node.network.adopt("one", pidfd)
        await asyncio.to_thread(node.network.remove, "two")
        assert world.slots() == {FIRST}, "of a place that nobody adopted"
        await node.network.release(["one"])
        assert not world.slots()


async def test_without_a_way_to_make_it_there_is_a_reason(world: World, ranges: IdRanges, tmp_path: Path) -> None:
    world.host.run(f"ip route add 198.19.5.0/24 via {ROUTER}")
    async with opened(world, ranges, tmp_path) as node:
        assert "198.19.5.0/24" in node.told[-1].missing
        with pytest.raises(FeatureMissing, match=r"198\.19\.5\.0/24"):
            await node.network.ready()
        async with watching(node):
            world.host.run("ip route delete 198.19.5.0/24")
            await until(lambda: node.told[-1].open)
        await node.network.ready()


async def test_all_of_it_goes(world: World, node: Node, pidfd: int) -> None:
    await node.network.ready()
    await node.network.attach("one", pidfd)
    with world.host.inside():
        for _ in range(2):
            node.network.purge()
            assert not world.slots()
    assert not world.forwarding() and not world.host.run("nft list ruleset")
