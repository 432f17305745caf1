"""Open networks: what a sandbox reaches and what not, what is left after crashes, what of the host is left alone."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from barchan.errors import CreateFailed, FeatureMissing
from barchan.kernel import netns
from barchan.kernel.probe import version_of
from barchan.net import rtnetlink
from tests.host.net_site import (
    FIRST,
    FOREIGN,
    HOST,
    INNER,
    INSTALLATION,
    METADATA,
    NAMESERVER,
    OTHER,
    PORT,
    PRIVATE,
    ROUTER,
    SECOND,
    SERVER,
    World,
    address,
    gateway,
    open_world,
)
from tests.netns import Namespace, source, unshare

CLONE_NEWUSER = 0x10000000


@pytest.fixture
def bare() -> Iterator[World]:
    with open_world() as made:
        yield made


@pytest.fixture
def world(bare: World) -> World:
    bare.attach()
    return bare


def test_it_reaches_the_outside_by_tcp_as_the_host(world: World) -> None:
    listener = world.outside.listen(SERVER, PORT)
    client = world.first.connect(SERVER, PORT)
    served, peer = listener.accept()
    with served:
        served.sendall(b"hello")
        assert (client.recv(16), peer[0]) == (b"hello", HOST)


def test_it_reaches_the_outside_by_udp_as_the_host_and_gets_answers(world: World) -> None:
    receiver = world.outside.receive(SERVER, PORT)
    for box in world.boxes:
        asking = box.socket(SERVER, socket.SOCK_DGRAM)
        asking.sendto(b"x", (SERVER, PORT))
        data, peer = receiver.recvfrom(16)
        assert (data, peer[0]) == (b"x", HOST)
        receiver.sendto(b"y", peer)
        asking.settimeout(5)
        assert asking.recvfrom(16) == (b"y", (SERVER, PORT))


def test_the_first_answer_arrives(bare: World) -> None:
    bare.prepare()
    receiver = bare.outside.receive(SERVER, PORT)
    for slot in range(30):
        box = Namespace(bare.undo)
        asking = box.socket(SERVER, socket.SOCK_DGRAM)
        bare.devices.attach(box.fd, slot)
        asking.sendto(b"x", (SERVER, PORT))
        receiver.sendto(b"y", receiver.recvfrom(16)[1])
        asking.settimeout(1)
        assert asking.recv(16) == b"y", f"slot {slot}: dropped by a device that did not carry yet"


def test_its_packets_fit_the_way_out(world: World) -> None:
    assert "mtu 1400" in world.first.run("ip link show eth0")


Attempt = Callable[[World], str | None]
"""Returns as whom it got through, or None."""


def to_sandbox(world: World) -> str | None:
    receiver = world.second.receive("0.0.0.0", PORT)
    world.first.send(address(SECOND), PORT)
    return source(receiver)


def to_host(at: str, port: int = PORT) -> Attempt:
    def attempt(world: World) -> str | None:
        receiver = world.host.receive("0.0.0.0", port)
        world.first.send(at, port)
        return source(receiver)

    return attempt


def to_outside(at: str, port: int = PORT) -> Attempt:
    def attempt(world: World) -> str | None:
        receiver = world.outside.receive(at, port)
        world.first.send(at, port)
        return source(receiver)

    return attempt


def to_inner(world: World) -> str | None:
    receiver = world.inner.receive(INNER, PORT)
    world.first.send(INNER, PORT)
    return source(receiver)


def spoofed(own: str) -> Attempt:
    def attempt(world: World) -> str | None:
        receiver = world.outside.receive(SERVER, PORT)
        world.first.run(f"ip address add {own}/32 dev eth0")
        world.first.send(SERVER, PORT, own)
        return source(receiver)

    return attempt


def as_the_host(world: World) -> str | None:
    """On a host that takes packets from its own addresses: others drop them anyway."""
    world.host.run(f"sysctl -qw net.ipv4.conf.{INSTALLATION.link(FIRST).name}.accept_local=1")
    return spoofed(HOST)(world)


def by_ipv6(world: World) -> str | None:
    link = INSTALLATION.link(FIRST)
    world.host.run("ip address add fd01::1/64 dev up0 nodad")
    world.first.run("ip address add fd02::2/64 dev eth0 nodad")
    mac = link.gateway_mac.hex(":")
    world.first.run(f"ip neighbour add fd02::1 lladdr {mac} dev eth0")
    world.first.run("ip route add fd01::/64 via fd02::1")
    receiver = world.host.receive("::", PORT)
    world.first.send("fd01::1", PORT)
    return source(receiver)


def from_outside(world: World) -> str | None:
    receiver = world.first.receive("0.0.0.0", PORT)
    world.outside.send(address(FIRST), PORT)
    return source(receiver)


def through_the_host(world: World) -> str | None:
    receiver = world.inner.receive("0.0.0.0", PORT)
    world.outside.send(INNER, PORT)
    return source(receiver)


CLOSED = ("ip daddr @closed",)
WALLS: dict[str, tuple[Attempt, tuple[str, ...]]] = {
    "another sandbox": (to_sandbox, (*CLOSED, 'oifname "barc*" reject')),
    "the host": (to_host(HOST), ("goto service",)),
    "the host's end": (to_host(gateway(FIRST)), ("goto service",)),
    "the host's end of another": (to_host(gateway(SECOND)), ("goto service",)),
    "metadata": (to_outside(METADATA), CLOSED),
    "private": (to_outside(PRIVATE), CLOSED),
    "name server, other port": (to_outside(NAMESERVER), CLOSED),
    "a neighbour of the host": (to_outside(ROUTER), CLOSED),
    "another network of the host": (to_inner, CLOSED),
    "as a stranger": (spoofed("192.0.2.77"), ("fib saddr",)),
    "as another sandbox": (spoofed(address(SECOND)), ("fib saddr",)),
    "as the host": (as_the_host, ("fib saddr",)),
    "IPv6": (by_ipv6, ("nfproto ipv6 drop", "fib saddr", "goto service")),
    "from outside": (from_outside, ("goto incoming",)),
    "through the host": (through_the_host, ('iifname != "barc*" oifname != "barc*" drop',)),
}


@pytest.mark.parametrize("wall", WALLS)
def test_it_does_not_get_through(world: World, wall: str) -> None:
    assert WALLS[wall][0](world) is None


@pytest.mark.parametrize("wall", WALLS)
def test_without_the_rule_it_does(world: World, wall: str) -> None:
    attempt, parts = WALLS[wall]
    if wall == "from outside":
        parts = (*parts, 'iifname != "barc*" oifname != "barc*" drop')
    world.weaken(*parts)
    assert attempt(world)


def test_name_servers_answer_on_their_port_alone(world: World) -> None:
    assert to_outside(NAMESERVER, 53)(world) == HOST


def test_refusals_are_answered_at_once(world: World) -> None:
    world.host.listen("0.0.0.0", PORT)
    world.second.listen("0.0.0.0", PORT)
    began = time.monotonic()
    for at in (HOST, gateway(FIRST), address(SECOND), METADATA, PRIVATE, ROUTER):
        with pytest.raises(OSError) as caught:
            world.first.connect(at, PORT)
        assert caught.value.errno == errno.EHOSTUNREACH, at
    assert time.monotonic() - began < 1, "a SYN is sent again after a second"


def test_what_is_granted_is_reached_and_taken_away_from_open_connections(world: World) -> None:
    world.prepare(world.open(granted=f"{PRIVATE}/32"))
    listener = world.outside.listen(PRIVATE, PORT)
    client = world.first.connect(PRIVATE, PORT)
    served, _ = listener.accept()
    with served:
        world.prepare()
        client.sendall(b"x")
        served.settimeout(0.3)
        with pytest.raises(TimeoutError):
            served.recv(1)


def test_ipv6_has_no_address(world: World) -> None:
    assert "inet6" not in world.first.run("ip address show dev eth0")
    assert "inet6" not in world.host.run(f"ip address show dev {INSTALLATION.link(FIRST).name}")


def test_neighbours_are_never_asked_for(world: World) -> None:
    to_outside(SERVER)(world)
    for end, name in ((world.first, "eth0"), (world.host, INSTALLATION.link(FIRST).name)):
        assert "PERMANENT" in end.run(f"ip neighbour show dev {name} nud all")
        assert "REACHABLE" not in end.run(f"ip neighbour show dev {name} nud all")


def test_detach_removes_both_ends_and_may_be_repeated(world: World) -> None:
    for _ in range(2):
        world.devices.detach(FIRST)
        assert world.slots() == {SECOND}
    assert "eth0" not in world.first.run("ip link")
    assert to_outside_from(world.second, world) == HOST


def to_outside_from(box: Namespace, world: World) -> str | None:
    receiver = world.outside.receive(SERVER, PORT)
    box.send(SERVER, PORT)
    return source(receiver)


@pytest.mark.skipif(
    version_of(os.uname().release) < (6, 8), reason="the kernel cannot forget connections of one address"
)
def test_late_answers_do_not_reach_the_next_one(world: World) -> None:
    receiver = world.outside.receive(SERVER, PORT)
    asking = world.first.socket(SERVER, socket.SOCK_DGRAM)
    asking.sendto(b"x", (SERVER, PORT))
    _, peer = receiver.recvfrom(16)
    receiver.sendto(b"answer", peer)
    assert source(asking) == SERVER
    asking.sendto(b"x", (SERVER, PORT))
    world.devices.detach(FIRST)
    following = Namespace(world.undo)
    world.devices.attach(following.fd, FIRST)
    waiting = following.receive("0.0.0.0", asking.getsockname()[1])
    receiver.sendto(b"late", peer)
    assert source(waiting) is None


def test_connections_of_others_are_kept(world: World) -> None:
    listener = world.outside.listen(SERVER, PORT)
    client = world.second.connect(SERVER, PORT)
    served, _ = listener.accept()
    with served:
        world.devices.detach(FIRST)
        served.sendall(b"y")
        assert client.recv(1) == b"y"


def test_many_are_detached_at_once(bare: World) -> None:
    bare.prepare()
    boxes = [Namespace(bare.undo) for _ in range(80)]
    for slot, box in enumerate(boxes):
        bare.devices.attach(box.fd, slot)
    assert bare.slots() == set(range(80))
    bare.devices.detach(*range(80))
    assert not bare.slots()


def test_prepare_twice_is_the_same(world: World) -> None:
    table, forwarding = world.table(), world.forwarding()
    for again in (world.devices, world.open()):
        world.prepare(again)
        assert (world.table(), world.forwarding()) == (table, forwarding)
    assert to_outside(SERVER)(world) == HOST


def test_a_slot_moves_to_another_namespace(world: World) -> None:
    world.devices.detach(SECOND)
    world.devices.attach(world.second.fd, FIRST)
    assert "eth0" not in world.first.run("ip link")
    assert to_outside_from(world.second, world) == HOST


def test_a_namespace_with_a_device_is_left_as_it_was(world: World) -> None:
    with pytest.raises(CreateFailed, match="File exists") as caught:
        world.devices.attach(world.first.fd, 9)
    assert caught.value.phase == "network"
    assert world.slots() == {FIRST, SECOND}
    assert to_outside(SERVER)(world) == HOST


def test_the_device_goes_with_its_namespace(bare: World) -> None:
    bare.prepare()
    with ExitStack() as life:
        bare.devices.attach(Namespace(life).fd, FIRST)
        assert bare.slots() == {FIRST}
    deadline = time.monotonic() + 10
    while bare.slots() and time.monotonic() < deadline:
        os.sched_yield()
    assert not bare.slots()


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_crash_leaves_what_is_listed_and_removed(bare: World, steps: int) -> None:
    bare.prepare()
    link = INSTALLATION.link(FIRST)
    requests = (rtnetlink.make(link, 1400, bare.first.fd), *rtnetlink.outside(link, ipv6=True))
    with bare.host.inside():
        crashed = bare.undo.enter_context(rtnetlink.RouteSocket())
    crashed(*requests[:steps])
    after = bare.open()
    assert bare.slots(after) == {FIRST}
    after.attach(bare.first.fd, FIRST)
    assert to_outside(SERVER)(bare) == HOST
    bare.remove_all(after)
    assert not bare.slots(after)


def test_remove_all_leaves_nothing_and_touches_nothing_else(bare: World) -> None:
    bare.host.run("nft -f -", FOREIGN)
    bare.host.run("ip link add barcade type veth peer name barcade2")
    before, links = bare.host.run("nft list ruleset"), bare.host.run("ip -o link")
    bare.attach()
    assert FOREIGN.split()[2] in bare.host.run("nft list ruleset")
    for _ in range(2):
        bare.remove_all()
        assert bare.host.run("nft list ruleset") == before
        assert bare.host.run("ip -o link") == links
        assert not bare.forwarding()


def test_a_router_stays_one(bare: World) -> None:
    bare.host.run("sysctl -qw net.ipv4.ip_forward=1")
    bare.attach()
    assert through_the_host(bare) == SERVER
    bare.remove_all()
    assert bare.forwarding() >= {"up0", "in0"}


def test_the_second_installation_keeps_forwarding_when_the_first_goes(world: World) -> None:
    second = world.open(OTHER)
    world.prepare(second)
    world.remove_all()
    box = Namespace(world.undo)
    second.attach(box.fd, 9)
    assert to_outside_from(box, world) == HOST
    assert through_the_host(world) is None
    world.remove_all(second)
    assert not world.forwarding()


def test_sandboxes_of_two_installations_do_not_meet(world: World) -> None:
    second = world.open(OTHER)
    world.prepare(second)
    box = Namespace(world.undo)
    receiver = world.first.receive("0.0.0.0", PORT)
    link = second.attach(box.fd, 9)
    box.send(address(FIRST), PORT)
    assert source(receiver) is None
    back = box.receive("0.0.0.0", PORT)
    world.first.send(str(link.address), PORT)
    assert source(back) is None


def test_addresses_that_the_host_uses_are_refused(bare: World) -> None:
    bare.host.run(f"ip route add 198.19.5.0/24 via {ROUTER}")
    with pytest.raises(FeatureMissing, match=r"198\.19\.5\.0/24"):
        bare.prepare()
    assert "barchan" not in bare.host.run("nft list ruleset")


@contextmanager
def process_in_its_own_namespaces() -> Iterator[int]:
    """Its pidfd. As in a sandbox, its network namespace is owned by its user namespace."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        unshare(CLONE_NEWUSER | netns.CLONE_NEWNET)
        theirs.send(b"x")
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    pidfd = os.pidfd_open(pid)
    try:
        assert ours.recv(1)
        yield pidfd
    finally:
        ours.close()
        os.waitpid(pid, 0)
        os.close(pidfd)


def test_a_process_in_a_user_namespace_gets_a_network(world: World) -> None:
    with process_in_its_own_namespaces() as pidfd:
        box = Namespace(world.undo, netns.of_process(pidfd))
        world.devices.attach(box.fd, 9)
        assert to_outside_from(box, world) == HOST


def test_a_process_that_ended_has_no_namespace() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    os.waitpid(pid, 0)
    home = os.readlink("/proc/thread-self/ns/net")
    with pytest.raises(ProcessLookupError):
        netns.of_process(pidfd)
    os.close(pidfd)
    assert os.readlink("/proc/thread-self/ns/net") == home


def test_a_wall_that_somebody_flushed_is_missed_and_comes_back(world: World) -> None:
    assert world.walled()
    world.host.run("nft flush ruleset")
    assert not world.walled()
    assert to_host(HOST)(world)
    world.prepare()
    assert world.walled()
    assert to_host(HOST, PORT + 1)(world) is None
    assert through_the_host(world) is None, "the host was no router before"
    world.remove_all()
    assert not world.forwarding()
