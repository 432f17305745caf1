"""Open networks of containers: whether this host can give them, and which places have a device.

At first it is only tried out, where it changes nothing. The packet filter is written, and the host's devices forward, once the
first sandbox asks for it, or when a former agent's did. `watch` brings back what somebody else removed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from typing import NamedTuple, TypeVar

from barchan.config import NodeConfig
from barchan.errors import BarchanError, CreateFailed, FeatureMissing
from barchan.kernel import netns
from barchan.kernel.copies import Copies, Copy
from barchan.kernel.idranges import IdRanges
from barchan.net import host, trial
from barchan.net.access import nameservers
from barchan.net.addresses import Addressing
from barchan.net.devices import Devices
from barchan.net.resolver import resolv_conf
from barchan.networks import NetworkInfo

logger = logging.getLogger(__name__)
T = TypeVar("T")
TARGET = "/etc/resolv.conf"
_HINT = "`barchan doctor` on the node says what to do"


class _Seen(NamedTuple):
    """Of the host's own network: what the packet filter was written for."""

    nameservers: tuple[IPv4Address, ...]
    routes: tuple[host.Route, ...]


class _Link(NamedTuple):
    slot: int
    pidfd: int
    """Of the sandbox's first process, for when it needs another device."""


class OpenNetwork:
    """Everything that touches devices happens in one thread of its own, in the order of the calls."""

    def __init__(
        self,
        config: NodeConfig,
        ranges: IdRanges,
        slot_of: Callable[[str], int],
        tell: Callable[[NetworkInfo], None],
    ) -> None:
        """`slot_of` a place, `OSError` when it has none any more. `tell` is called in the event loop when something changed."""
        self._access = config.network
        self._addressing = Addressing(ranges.instance, config.network.prefix)
        self._ranges = ranges
        self._slot_of = slot_of
        self._tell = tell
        self._copies = Copies(config.layout.run / "files")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="network")
        self._info = NetworkInfo(missing="it was not tried yet")
        self._devices: Devices | None = None
        self._seen: _Seen | None = None
        self._links: dict[str, _Link] = {}
        self._closed = False

    async def open(self) -> None:
        """Find out whether it can be had; then take up what a former agent left."""
        await self._in_thread(self._try)

    def _try(self) -> None:
        try:
            servers = nameservers(self._access)
            trial.attempt(self._addressing)
            self._info = NetworkInfo(open=True, obstacles=trial.obstacles())
            with Devices(self._addressing, servers) as found:
                used, listed = found.walled(), found.list()
            if used or listed:
                self._prepare().detach(*(listed - self._ranges.held()))
        except (BarchanError, OSError) as error:
            self._info = NetworkInfo(missing=str(error))

    async def ready(self) -> None:
        """Before a sandbox is made that needs it. Raises `FeatureMissing`."""
        if self._seen is None:
            await self._in_thread(self._begin)
        if not self._info.open:
            said = self._info.missing
            raise FeatureMissing(f"no open network here: {said}", phase="network", field="network.mode", hint=_HINT)

    def _begin(self) -> None:
        if self._seen is None and self._info.open:
            try:
                self._prepare()
            except (BarchanError, OSError) as error:
                self._info = NetworkInfo(missing=str(error))

    def _prepare(self) -> Devices:
        """For the host's network as it is now."""
        seen = self._look_around()
        devices = self._devices
        if devices is None or self._seen is None or seen.nameservers != self._seen.nameservers:
            devices = Devices(self._addressing, seen.nameservers, self._access.granted)
        try:
            devices.prepare()
            self._copies.prepare()
        except BaseException:
            if devices is not self._devices:
                devices.close()
            raise
        if self._devices is not None and self._devices is not devices:
            self._devices.close()
        self._devices, self._seen = devices, seen
        return devices

    def _look_around(self) -> _Seen:
        """A host that asks nobody for names at the moment, because it is between two networks, will again ask those that it asked."""
        try:
            servers = nameservers(self._access)
        except FeatureMissing:
            if self._seen is None:
                raise
            servers = self._seen.nameservers
        return _Seen(servers, host.routes())

    # --- of one sandbox

    @property
    def resolv_conf(self) -> bytes:
        """What it says inside; empty before `ready`."""
        return resolv_conf(self._seen.nameservers).encode() if self._seen is not None else b""

    def copy(self) -> Copy:
        """Of `resolv_conf`. Does not wait for anything. Raises `OSError`."""
        return self._copies.open(self.resolv_conf)

    async def attach(self, place: str, pidfd: int) -> None:
        """Give the namespace of this process a device. Raises `CreateFailed`, `FeatureMissing`; `release` is called then, too."""
        await self._in_thread(lambda: self._attach(place, pidfd))

    def _attach(self, place: str, pidfd: int) -> None:
        assert self._devices is not None, "it is ready"
        self._keep(place, pidfd)
        try:
            _connect(self._devices, self._links[place])
        except ProcessLookupError as error:
            raise CreateFailed("its first process ended", phase="network") from error
        except OSError as error:
            raise CreateFailed(f"network namespace: {error.strerror}", phase="network") from error

    def _keep(self, place: str, pidfd: int) -> None:
        self._links[place] = _Link(self._slot_of(place), os.dup(pidfd))

    async def adopt(self, place: str, pidfd: int) -> None:
        """Of a sandbox that a former agent made."""
        await self._in_thread(lambda: self._keep(place, pidfd))

    async def release(self, places: Iterable[str]) -> None:
        """Their devices go, together. Idempotent. Raises `CreateFailed`; then it can be tried again."""
        if mine := [place for place in places if place in self._links]:
            await self._in_thread(lambda: self._release(mine))

    def remove(self, place: str) -> None:
        """As `release`, blocking, from any thread; also of a place that this agent did not make."""
        self._thread.submit(self._remove, place).result()

    def _remove(self, place: str) -> None:
        if place in self._links:
            self._release([place])
        elif self._devices is not None:
            with contextlib.suppress(FileNotFoundError):
                self._devices.detach(*({self._slot_of(place)} & self._devices.list()))

    def _release(self, places: list[str]) -> None:
        found = {place: self._links[place] for place in places if place in self._links}
        if self._devices is not None and found:
            self._devices.detach(*(link.slot for link in found.values()))
        for place, link in found.items():
            os.close(link.pidfd)
            del self._links[place]

    # --- as long as the agent runs

    async def watch(self) -> None:
        """For ever."""
        while True:
            await self._in_thread(self._look)
            await asyncio.sleep(self._access.watch_seconds)

    def _look(self) -> None:
        try:
            if self._devices is None and not self._info.open:
                self._try()
            elif self._devices is not None:
                self._restore(self._devices)
        except (BarchanError, OSError) as error:
            logger.error("open network: %s", error)

    def _restore(self, devices: Devices) -> None:
        if not devices.walled():
            logger.warning("the packet filter of sandboxes was removed by somebody; it is written again")
            devices = self._prepare()
        elif self._seen != self._look_around():
            logger.info("the host's network has changed")
            devices = self._prepare()
        there = devices.list()
        for place, link in list(self._links.items()):
            if link.slot not in there:
                self._repair(devices, place, link)

    def _repair(self, devices: Devices, place: str, link: _Link) -> None:
        try:
            _connect(devices, link)
            logger.warning("%s: its network device was removed by somebody; it has another", place)
        except ProcessLookupError:
            return
        except (BarchanError, OSError) as error:
            logger.error("%s has no network device: %s", place, error)

    async def close(self) -> None:
        """Leaves everything as it is for the next agent. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._in_thread(self._let_go)
            self._thread.shutdown()

    def _let_go(self) -> None:
        for link in self._links.values():
            os.close(link.pidfd)
        self._links.clear()
        if self._devices is not None:
            self._devices.close()

    def purge(self) -> None:
        """Everything of this installation goes. Blocking; sandboxes must be gone."""
        with Devices(self._addressing, ()) as devices:
            try:
                devices.remove_all()
            except FeatureMissing as error:
                logger.info("no packet filter to remove: %s", error)
        self._copies.close()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        before = self._info
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            if self._info != before:
                self._tell(self._info)


def _connect(devices: Devices, link: _Link) -> None:
    namespace = netns.of_process(link.pidfd)
    try:
        devices.attach(namespace, link.slot)
    finally:
        os.close(namespace)
