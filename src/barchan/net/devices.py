"""Open networks: a sandbox's device, its way out through the host, and the wall around it.

    prepare()                 the packet filter of this installation; forwarding on the host's own devices
    attach(netns, slot)       a pair of devices, one end in the namespace; addresses; the default route
    detach(slot, …)           both ends gone
    walled()                  whether the packet filter is still there
    list()                    slots that have a device, whoever made it
    remove_all()              everything of this installation, devices first

All may be repeated, by another process too: names follow from the installation and the slot (`addresses`), nothing is
needed from memory. A crash leaves at most a device, which `list` finds; the device of a sandbox whose processes are gone
goes with its namespace. There is no IPv6 in a sandbox.

Forwarding is turned on for single devices of the host (`net.ipv4.conf.DEVICE.forwarding`), never for all, and off again by
`remove_all`. A host that forwarded nothing before forwards nothing but packets of sandboxes (`rules.Policy.router`).

Everything happens in the network namespace of the thread that made the object. Blocking: the kernel has one lock for all
of it. Errors: `FeatureMissing` where the host lacks something, `CreateFailed` otherwise, both with the phase `network`.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import Self

from barchan.errors import CreateFailed, FeatureMissing, NodeError
from barchan.kernel import netns as namespaces
from barchan.net import host, nft, rtnetlink, rules
from barchan.net.addresses import Addressing, Link

_CARRIER_SECONDS = 2.0
_CARRIER_PAUSE = 0.0005
_NO_VETH = "the kernel needs veth devices (CONFIG_VETH)"


class Devices:
    """Of one installation on this host. Threads take turns."""

    def __init__(
        self, addressing: Addressing, nameservers: Iterable[IPv4Address], granted: Iterable[IPv4Network] = ()
    ) -> None:
        """`granted`: private networks that sandboxes may reach. Changes nothing yet; raises `OSError`."""
        self._addressing = addressing
        self._nameservers = tuple(nameservers)
        self._granted = tuple(granted)
        self._route = rtnetlink.RouteSocket()
        self._connections = rtnetlink.RouteSocket(rtnetlink.CONNECTIONS)
        self._turn = threading.Lock()
        self._mtu = host.USUAL_MTU
        self._ipv6 = host.has_ipv6()
        self._mine: frozenset[str] = frozenset()

    def prepare(self) -> None:
        """Also when the host's network has changed: its connected networks are walled off as they are now."""
        with self._turn:
            try:
                self._prepare()
            except OSError as error:
                raise _typed(error) from error

    def _prepare(self) -> None:
        routes = host.routes()
        refuse_overlap(self._addressing.prefix, routes)
        mine, theirs = self._forwarded()
        before = host.forwarding_devices()
        uplinks = frozenset(route.device for route in routes) - {"lo"}
        router = bool(before - mine - theirs)
        self._mine = mine | (uplinks & theirs) | (uplinks - before)
        policy = rules.Policy(
            addressing=self._addressing,
            nameservers=self._nameservers,
            granted=self._granted,
            connected=tuple(route.network for route in routes if route.connected),
            forwarded=tuple(sorted(self._mine)),
            router=router,
        )
        nft.load(rules.ruleset(policy))  # before forwarding: a host that is no router must not become one
        for device in uplinks - before:
            host.forward(device, True)
        self._mtu = host.smallest_mtu({route.device for route in routes if route.default})

    def _forwarded(self) -> tuple[frozenset[str], frozenset[str]]:
        """Devices on which this installation turned forwarding on, and on which others did.

        The table tells an agent that starts; a table that somebody else removed tells nothing any more.
        """
        tables = nft.forwarded()
        self._mine |= tables.pop(rules.table(self._addressing), frozenset())
        return self._mine, frozenset[str]().union(*tables.values())

    def attach(self, netns: int, slot: int) -> Link:
        """`netns`: descriptor of the sandbox's namespace. What the slot had is removed. On an error nothing is left."""
        link = self._addressing.link(slot)
        with self._turn:
            try:
                self._make(link, netns)
                self._route(*rtnetlink.outside(link, ipv6=self._ipv6))
                _furnish(link, netns, ipv6=self._ipv6)
                self._await_carrier(link)
            except BaseException as error:
                self._remove([link.name])
                if isinstance(error, OSError):
                    raise _typed(error) from error
                raise
        return link

    def _await_carrier(self, link: Link) -> None:
        """The other end was up last, so it is this one that may be late; an answer that is lost costs a name 5 s."""
        deadline = time.monotonic() + _CARRIER_SECONDS
        while not self._route.carries(link.index) and time.monotonic() < deadline:
            time.sleep(_CARRIER_PAUSE)

    def _make(self, link: Link, netns: int) -> None:
        request = rtnetlink.make(link, self._mtu, netns)
        try:
            self._route(request)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.EBUSY):
                raise
            self._remove([link.name])
            self._route(request)

    def detach(self, *slots: int) -> None:
        """Idempotent. Takes about 20 ms, for one as for many, in which the kernel changes no other device."""
        links = [self._addressing.link(slot) for slot in slots]
        with self._turn:
            self._remove([link.name for link in links])
            self._forget(links)

    def _forget(self, links: Iterable[Link]) -> None:
        """No late answer to a connection of theirs reaches whoever has the address next. Not every kernel can."""
        outcomes = self._connections.each([rtnetlink.forget_connections(link.address) for link in links])
        for failure in outcomes:
            if failure is not None and failure.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT):
                raise _typed(failure) from failure

    def _remove(self, names: Sequence[str]) -> None:
        if len(names) == 1:
            requests = [rtnetlink.remove(names[0])]
        else:
            group = self._addressing.leaving
            requests = [*(rtnetlink.regroup(name, group) for name in names), rtnetlink.remove_group(group)]
        for failure in self._route.each(requests):
            if failure is not None and failure.errno != errno.ENODEV:
                raise _typed(failure) from failure

    def list(self) -> frozenset[int]:
        """In the calling thread's namespace."""
        slots = (self._addressing.slot(name) for _, name in socket.if_nameindex())
        return frozenset(slot for slot in slots if slot is not None)

    def walled(self) -> bool:
        """The packet filter is there. It is not after somebody flushed all tables of the host: `prepare` brings it back."""
        with self._turn:
            return rules.table(self._addressing) in nft.forwarded()

    def remove_all(self) -> None:
        """Idempotent; needs no `prepare`. Forwarding stays on where another installation needs it."""
        self.detach(*self.list())
        with self._turn:
            mine, theirs = self._forwarded()
            for device in mine - theirs:
                host.forward(device, False)
            nft.load(rules.removal(self._addressing))
            self._mine = frozenset()

    def close(self) -> None:
        """Leaves everything in place. Idempotent."""
        self._route.close()
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_overlap(prefix: IPv4Network, routes: Iterable[host.Route]) -> None:
    """Raises `FeatureMissing`."""
    for route in routes:
        if not route.default and route.network.overlaps(prefix):
            raise FeatureMissing(
                f"the addresses of sandboxes, {prefix}, are among those of {route.device} ({route.network})",
                phase="network",
                hint="give this node another prefix (`barchan up --network-prefix`)",
            )


def _furnish(link: Link, netns: int, *, ipv6: bool) -> None:
    with namespaces.entered(netns):
        inside = rtnetlink.RouteSocket()
    with inside:  # a socket stays in the namespace in which it was made, and holds it until it is closed
        inside(*rtnetlink.inside(link, ipv6=ipv6))


def _typed(error: OSError) -> NodeError:
    said = f"network device: {error.strerror or error}"
    if error.errno == errno.EOPNOTSUPP:
        return FeatureMissing(said, phase="network", hint=_NO_VETH)
    return CreateFailed(said, phase="network")
