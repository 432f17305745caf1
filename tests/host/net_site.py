"""Hosts, sandboxes and an Internet made of network namespaces: the host's own network is never touched.

first, second (sandboxes) --- host --- outside: the Internet, a metadata service and private networks behind one router
                                +----- inner: another network of the host
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address, IPv4Network

import pytest

from barchan.net import host, rules
from barchan.net.addresses import Addressing
from barchan.net.devices import Devices
from tests.netns import Namespace

INSTALLATION = Addressing("one")
OTHER = Addressing("two")
ROUTER, HOST = "203.0.113.1", "203.0.113.2"
SERVER, PRIVATE, NAMESERVER, METADATA = "198.51.100.7", "10.99.0.8", "10.99.0.53", "169.254.169.254"
INNER = "10.77.0.2"
PORT = 8000
FIRST, SECOND = 3, 4
FOREIGN = 'table inet foreign {\n\tchain c {\n\t\tcomment "kept"\n\t}\n}\n'


class World:
    """Nothing is prepared yet."""

    def __init__(self, undo: ExitStack) -> None:
        self.undo = undo
        self.host, self.outside, self.inner, *self.boxes = (Namespace(undo) for _ in range(5))
        self.first, self.second = self.boxes
        self._join("up0", HOST, self.outside, ROUTER)
        self._join("in0", "10.77.0.1", self.inner, INNER)
        self.host.run(f"ip route add default via {ROUTER}")
        self.inner.run("ip route add default via 10.77.0.1")
        for address in (SERVER, PRIVATE, NAMESERVER, METADATA):
            self.outside.run(f"ip address add {address}/32 dev lo")
        self.outside.run(f"ip route add 10.77.0.0/24 via {HOST} src {SERVER}")
        self.outside.run(f"ip route add 198.18.0.0/15 via {HOST} src {SERVER}")
        self.devices = self.open()

    def _join(self, device: str, ours: str, other: Namespace, theirs: str) -> None:
        self.host.run(f"ip link add {device} mtu 1400 type veth peer name eth0 netns {other.path}")
        for end, name, address in ((self.host, device, ours), (other, "eth0", theirs)):
            end.run(f"ip address add {address}/24 dev {name}")
            end.run(f"ip link set {name} up")

    def open(self, addressing: Addressing = INSTALLATION, granted: str = "") -> Devices:
        networks = [IPv4Network(granted)] if granted else []
        with self.host.inside():
            return self.undo.enter_context(Devices(addressing, [IPv4Address(NAMESERVER)], networks))

    def prepare(self, made: Devices | None = None) -> None:
        with self.host.inside():
            (made or self.devices).prepare()

    def attach(self) -> None:
        self.prepare()
        for slot, box in ((FIRST, self.first), (SECOND, self.second)):
            self.devices.attach(box.fd, slot)

    def slots(self, made: Devices | None = None) -> frozenset[int]:
        with self.host.inside():
            return (made or self.devices).list()

    def walled(self) -> bool:
        with self.host.inside():
            return self.devices.walled()

    def remove_all(self, made: Devices | None = None) -> None:
        with self.host.inside():
            (made or self.devices).remove_all()

    def forwarding(self) -> frozenset[str]:
        with self.host.inside():
            return host.forwarding_devices()

    def table(self, addressing: Addressing = INSTALLATION) -> str:
        return self.host.run(f"nft list table inet {rules.table(addressing)}")

    def weaken(self, *parts: str) -> None:
        """The table without the lines that hold one of the texts."""
        lines = self.table().splitlines()
        kept = [line for line in lines if not any(part in line for part in parts)]
        assert len(kept) <= len(lines) - len(parts), f"not in the table: {parts}"
        self.host.run("nft -f -", rules.removal(INSTALLATION) + "\n".join(kept) + "\n")


def address(slot: int) -> str:
    return str(INSTALLATION.link(slot).address)


def gateway(slot: int) -> str:
    return str(INSTALLATION.link(slot).gateway)


@contextmanager
def open_world() -> Iterator[World]:
    if os.geteuid() or not shutil.which("nft", path="/usr/sbin:/usr/bin") or not shutil.which("ip"):
        pytest.skip("network namespaces need root, nftables and iproute2")
    with ExitStack() as undo:
        yield World(undo)
