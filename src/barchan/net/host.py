"""What the packet filter needs to know of the host's own network, and the one setting of it that is changed: forwarding.

Everything here is of the network namespace in which the calling thread is.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import msgspec

from barchan.net.addresses import FAMILY

_ROUTES = Path("/proc/thread-self/net/route")
_SETTINGS = Path("/proc/sys/net/ipv4/conf")
_IPV6 = Path("/proc/sys/net/ipv6")
_SIOCGIFMTU = 0x8921
_REJECT = 0x200
USUAL_MTU = 1500


class Route(msgspec.Struct, frozen=True):
    """One of the main table."""

    device: str
    network: IPv4Network
    gateway: IPv4Address

    @property
    def connected(self) -> bool:
        return not int(self.gateway) and not self.default

    @property
    def default(self) -> bool:
        return self.network.prefixlen == 0


def parse_routes(text: str) -> tuple[Route, ...]:
    """Of /proc/net/route, without those of sandboxes (of any installation)."""
    rows = (line.split() for line in text.splitlines()[1:])
    return tuple(_route(row) for row in rows if not row[0].startswith(FAMILY) and not int(row[3], 16) & _REJECT)


def _route(row: list[str]) -> Route:
    return Route(row[0], IPv4Network((_address(row[1]), int(row[7], 16).bit_count())), _address(row[2]))


def _address(text: str) -> IPv4Address:
    """The kernel prints the number as it lies in memory."""
    return IPv4Address(struct.pack("=I", int(text, 16)))


def routes() -> tuple[Route, ...]:
    return parse_routes(_ROUTES.read_text())


def smallest_mtu(devices: Iterable[str]) -> int:
    """In bytes; that of Ethernet when there is no device. With it no packet of a sandbox is too big on its way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as asked:
        return min((_mtu(asked, device) for device in devices), default=USUAL_MTU)


def _mtu(asked: socket.socket, device: str) -> int:
    answer = fcntl.ioctl(asked, _SIOCGIFMTU, struct.pack("16si20x", device.encode(), 0))
    return int(struct.unpack_from("i", answer, 16)[0])


def has_ipv6() -> bool:
    return _IPV6.exists()


def forwarding_devices() -> frozenset[str]:
    """Devices, other than those of sandboxes, from which the host routes packets."""
    names = (name for name in os.listdir(_SETTINGS) if name not in ("all", "default") and not name.startswith(FAMILY))
    return frozenset(name for name in names if _forwarding(name).read_text().strip() != "0")


def forward(device: str, wanted: bool) -> None:
    """A device that is gone is left alone."""
    try:
        _forwarding(device).write_text(f"{wanted:d}\n")
    except FileNotFoundError:
        return


def _forwarding(device: str) -> Path:
    return _SETTINGS / device / "forwarding"
