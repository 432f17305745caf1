"""Requests to the kernel's network configuration (rtnetlink(7)), and one to its table of connections (ctnetlink): several in one
system call, each acknowledged.

By hand, because the library for it (pyroute2) takes 0.24 s of CPU to import and 1 ms a request.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address
from types import TracebackType
from typing import Self

from barchan.net.addresses import Link

INSIDE = "eth0"
INSIDE_INDEX = 100
"""Above those of devices that some kernels put into every namespace."""

_NEWLINK, _DELLINK, _GETLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH = 16, 17, 18, 20, 24, 28
CONNECTIONS = 12
"""Protocol of netfilter's sockets."""
_FORGET = 1 << 8 | 2
_REQUEST, _ACK, _EXCL, _CREATE = 0x01, 0x04, 0x200, 0x400
_ERROR = 2
_NESTED = 0x8000
_SOL_NETLINK, _EXT_ACK, _CAP_ACK = 270, 11, 10
_ACK_TLVS = 0x200
_UP = 1
_OPERATIONAL = b"\6"
_SKIP_STATISTICS = 8
_PERMANENT = 0x80
_NET_NS_FD, _TX_QUEUES, _RX_QUEUES = 28, 31, 32
_ANSWERS = 1 << 16
_TOGETHER = 64
"""Whose answers surely fit into the socket's buffer."""


class Request(bytes):
    """One message without its sequence number."""


class RouteSocket:
    """Of the network namespace in which the calling thread is. Not for two threads at once."""

    def __init__(self, protocol: int = socket.NETLINK_ROUTE) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        for option in (_EXT_ACK, _CAP_ACK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        self._next = 0

    def __call__(self, *requests: Request) -> None:
        """The kernel tries each, also after one failed. `OSError` of the first failure, with the kernel's words."""
        if failure := next((one for one in self.each(requests) if one is not None), None):
            raise failure

    def each(self, requests: Sequence[Request]) -> list[OSError | None]:
        """What became of each."""
        some = [requests[at : at + _TOGETHER] for at in range(0, len(requests), _TOGETHER)]
        return [outcome for few in some for outcome in self._together(few)]

    def _together(self, requests: Sequence[Request]) -> list[OSError | None]:
        numbers = range(self._next, self._next + len(requests))
        self._next = numbers.stop & 0x3FFFFFFF
        self._socket.send(b"".join(map(_numbered, requests, numbers)))
        answers: dict[int, OSError | None] = {}
        while not answers.keys() >= set(numbers):
            answers.update(_answers(self._socket.recv(_ANSWERS)))
        return [answers[number] for number in numbers]

    def carries(self, index: int) -> bool:
        """Whether the device takes packets: until the kernel has noticed that the other end is up, it drops them in silence.

        From Linux 6.7 on the question makes it notice.
        """
        self._socket.send(
            _numbered(_request(_GETLINK, 0, _device(index) + _number(29, _SKIP_STATISTICS), ack=0), self._next)
        )
        self._next = (self._next + 1) & 0x3FFFFFFF
        answer = self._socket.recv(_ANSWERS)
        (kind,) = struct.unpack_from("=H", answer, 4)
        if kind == _ERROR:
            raise _failure(answer, 0) or OSError(errno.EPROTO, "no answer")
        return _first(answer[32:], 16)[:1] == _OPERATIONAL

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make(link: Link, mtu: int, netns: int) -> Request:
    """A pair of devices, one end of it in the namespace `netns`; both are down."""
    # one queue: otherwise there is one for each CPU of the host
    sizes = _number(4, mtu) + _number(_TX_QUEUES, 1) + _number(_RX_QUEUES, 1)
    peer = _device(INSIDE_INDEX) + _name(INSIDE) + _attribute(1, link.mac) + _number(_NET_NS_FD, netns) + sizes
    pair = _attribute(1, b"veth") + _nest(2, _nest(1, peer))
    body = _device(link.index) + _name(link.name) + _attribute(1, link.gateway_mac) + sizes + _nest(18, pair)
    return _request(_NEWLINK, _CREATE | _EXCL, body)


def remove(name: str) -> Request:
    """Both ends. ENODEV when there is none."""
    return _request(_DELLINK, 0, _device(0) + _name(name))


def regroup(name: str, group: int) -> Request:
    """For `remove_group`. ENODEV when there is none."""
    return _request(_NEWLINK, 0, _device(0) + _name(name) + _number(27, group))


def remove_group(group: int) -> Request:
    """All its devices in one step: for each step the kernel waits until no CPU uses what goes. ENODEV when there is none."""
    return _request(_DELLINK, 0, _device(0) + _number(27, group))


def without_ipv6(index: int) -> Request:
    """No IPv6 address of its own: the device would have one as soon as it is up, so this comes first."""
    return _request(_NEWLINK, 0, _device(index) + _nest(26, _nest(socket.AF_INET6, _attribute(8, b"\1"))))


def forwarding(index: int) -> Request:
    """Packets that come from this device are routed, and nobody is told of a better way."""
    wanted = {1: 1, 4: 0, 5: 0, 6: 0, 9: 0}  # forwarding; accept, secure and send redirects; source routes
    settings = b"".join(_number(key, value) for key, value in wanted.items())
    return _request(_NEWLINK, 0, _device(index) + _nest(26, _nest(socket.AF_INET, _nest(1, settings))))


def up(index: int) -> Request:
    return _request(_NEWLINK, 0, _device(index, _UP, _UP))


def address(index: int, own: IPv4Address) -> Request:
    """One of a /31, and the route to the other."""
    body = struct.pack("=4BI", socket.AF_INET, 31, 0, 0, index) + _attribute(2, own.packed) + _attribute(1, own.packed)
    return _request(_NEWADDR, _CREATE | _EXCL, body)


def neighbour(index: int, other: IPv4Address, mac: bytes) -> Request:
    """Never asked for. Of those that it found out by itself the kernel keeps 1024 for all namespaces together."""
    head = struct.pack("=BBHiHBB", socket.AF_INET, 0, 0, index, _PERMANENT, 0, 0)
    return _request(_NEWNEIGH, _CREATE, head + _attribute(1, other.packed) + _attribute(2, mac))


def default_route(index: int, gateway: IPv4Address) -> Request:
    table, static, everywhere, unicast = 254, 4, 0, 1
    head = struct.pack("=8BI", socket.AF_INET, 0, 0, 0, table, static, everywhere, unicast, 0)
    return _request(_NEWROUTE, _CREATE | _EXCL, head + _attribute(5, gateway.packed) + _number(4, index))


def forget_connections(own: IPv4Address) -> Request:
    """For a socket of `CONNECTIONS`: those that this address began. EINVAL before Linux 6.8, which cannot."""
    source, wanted = _attribute(1, own.packed), _number(1, 1)
    began = _nest(1, _nest(1, source))
    return _request(_FORGET, 0, struct.pack("=BBH", socket.AF_INET, 0, 0) + began + _nest(25, wanted))


def outside(link: Link, *, ipv6: bool) -> tuple[Request, ...]:
    """What the host's end gets once it is made."""
    at = link.index
    return (
        *((without_ipv6(at),) if ipv6 else ()),
        forwarding(at),
        up(at),
        address(at, link.gateway),
        neighbour(at, link.address, link.mac),
    )


def inside(link: Link, *, ipv6: bool) -> tuple[Request, ...]:
    """What the other end gets, from a socket of its namespace."""
    at = INSIDE_INDEX
    return (
        *((without_ipv6(at),) if ipv6 else ()),
        up(at),
        address(at, link.address),
        neighbour(at, link.gateway, link.gateway_mac),
        default_route(at, link.gateway),
    )


def _device(index: int, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("=BBHiII", socket.AF_UNSPEC, 0, 0, index, flags, change)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _nest(kind: int, value: bytes) -> bytes:
    return _attribute(kind | _NESTED, value)


def _number(kind: int, value: int) -> bytes:
    return struct.pack("=HHI", 8, kind, value)


def _name(name: str) -> bytes:
    return _attribute(3, name.encode() + b"\0")


def _request(kind: int, flags: int, body: bytes, ack: int = _ACK) -> Request:
    return Request(struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | ack | flags, 0, 0) + body)


def _numbered(request: Request, number: int) -> bytes:
    return request[:8] + struct.pack("=I", number) + request[12:]


def _answers(data: bytes) -> Iterator[tuple[int, OSError | None]]:
    at = 0
    while at + 16 <= len(data):
        length, kind, flags, number, _ = struct.unpack_from("=IHHII", data, at)
        if kind == _ERROR:
            yield number, _failure(data[at : at + length], flags)
        at += (length + 3) & ~3


def _failure(answer: bytes, flags: int) -> OSError | None:
    code = -struct.unpack_from("=i", answer, 16)[0]
    if not code:
        return None
    said = _words(answer[36:]) if flags & _ACK_TLVS else ""
    return OSError(code, os.strerror(code) + (f" ({said})" if said else ""))


def _words(attributes: bytes) -> str:
    """The text of an extended acknowledgement."""
    return _first(attributes, 1).rstrip(b"\0").decode(errors="replace")


def _first(attributes: bytes, wanted: int) -> bytes:
    """The value of the first of this kind; empty when there is none."""
    at = 0
    while at + 4 <= len(attributes):
        length, kind = struct.unpack_from("=HH", attributes, at)
        if kind == wanted:
            return attributes[at + 4 : at + length]
        at += max((length + 3) & ~3, 4)
    return b""
