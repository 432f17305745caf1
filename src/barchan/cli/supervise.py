"""Keeps API and node agent running: starts them, starts either again when it dies, ends both.

The sandboxes belong to neither: they outlive every process here. SIGTERM leaves them running for the next `up`, SIGINT
(ctrl-C) stops them too. A second signal does not wait for anybody.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from barchan.cli.datadir import UpRecord, read_record, write_record
from barchan.cli.processes import ProcessRef, end, is_alive, reference
from barchan.cli.services import Service, how_ended, purge
from barchan.config import Layout
from barchan.errors import BarchanError

BACKOFF_FIRST, BACKOFF_MOST = 0.1, 10.0
STEADY_SECONDS = 30.0
"""A service that lived this long starts again with the shortest delay."""
PURGE_SECONDS = 120.0

Reporter = Callable[[str, dict[str, Any]], None]
"""Takes what happened (`started`, `ready`, `ended`, …) and its details."""


def next_delay(previous: float, lived: float) -> float:
    """Seconds to wait before a restart, after the delay before (0: none yet) and a life of `lived` seconds."""
    if previous == 0 or lived >= STEADY_SECONDS:
        return BACKOFF_FIRST
    return min(previous * 2, BACKOFF_MOST)


def end_leftovers(record: UpRecord | None) -> tuple[str, ...]:
    """End what a killed supervisor left running, so that nobody else serves the directory. Call with the lock held."""
    ended = []
    for name, process in (record.services if record else {}).items():
        if _end(process):
            ended.append(name)
    return tuple(ended)


def _end(process: ProcessRef) -> bool:
    alive = is_alive(process)
    if alive and not end(process, signal.SIGTERM, 10.0):
        end(process, signal.SIGKILL, 10.0)
    return alive


def services_of(record: UpRecord) -> tuple[Service, ...]:
    """The API first: the node agent dials its socket."""
    return (
        Service("api", "barchan.cli.serve_api", record.api),
        Service("node", "barchan.node.main", record.node),
    )


class Supervisor:
    """Of one data directory, whose lock the caller holds."""

    def __init__(self, record: UpRecord, report: Reporter, services: Sequence[Service] = ()) -> None:
        """`services` in the order of their start; by default the two of the record."""
        self._record = record
        self._report = report
        self._layout: Layout = record.node.layout
        self._services = tuple(services) or services_of(record)
        self._stopping = asyncio.Event()
        self._interrupted = False
        self.url = ""
        """Where the API listens on TCP, with the port that was bound."""

    async def run(self, announce: Callable[[], None], *, also: Callable[[], None] | None = None) -> None:
        """Serve until a signal. `announce` is called once, when both serve; `also` every minute. Raises the first failure."""
        self._listen()
        keepers: list[asyncio.Task[None]] = []
        try:
            if await self._start_all():
                announce()
                keepers = [asyncio.create_task(self._keep(service)) for service in self._services]
                keepers += [asyncio.create_task(_every_minute(also))] if also else []
                await self._stopping.wait()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._stop_all()
        if self._interrupted:
            await self._purge()
        self._report("stopped", {"sandboxes": "stopped" if self._interrupted else "left running"})

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            for service in self._services:
                service.kill()
            return
        self._interrupted = number == signal.SIGINT
        self._stopping.set()

    async def _start_all(self) -> bool:
        """False when a signal came before both served."""
        self._save()
        for service in self._services:
            starting = asyncio.create_task(self._start(service))
            stopping = asyncio.create_task(self._stopping.wait())
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return False
            starting.result()
        return True

    async def _start(self, service: Service) -> None:
        began = time.monotonic()
        process = await service.launch()
        self._save()
        said = await service.ready()
        seconds = round(time.monotonic() - began, 3)
        self.url = said.get("url") or self.url
        self._report("started", {"service": service.name, "pid": process.pid, "seconds": seconds})

    async def _keep(self, service: Service) -> None:
        delay = 0.0
        while True:
            began = time.monotonic()
            code = await service.ended()
            delay = next_delay(delay, time.monotonic() - began)
            self._report("ended", {"service": service.name, "how": how_ended(code), "restart_in": delay})
            await asyncio.sleep(delay)
            try:
                await self._start(service)
            except BarchanError as error:
                self._report("failed", {"service": service.name, "error": str(error)})

    async def _stop_all(self) -> None:
        await asyncio.gather(*(service.stop() for service in self._services))
        _remove_sockets(self._layout)
        self._save()

    async def _purge(self) -> None:
        self._report("cleaning", {"data": str(self._layout.data)})
        await purge(self._record.node, PURGE_SECONDS)

    def _save(self) -> None:
        references = {s.name: r for s in self._services if (r := s.reference) is not None and r.started}
        record = UpRecord(
            api=self._record.api, node=self._record.node, supervisor=reference(os.getpid()), services=references
        )
        write_record(self._layout, record)


async def _every_minute(call: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(60)
        call()


def _remove_sockets(layout: Layout) -> None:
    """A socket that is there means a server that is there."""
    for socket in (layout.api_socket, layout.node_socket):
        socket.unlink(missing_ok=True)


async def take_down(layout: Layout, *, keep_sandboxes: bool, timeout: float, report: Reporter) -> None:
    """After the supervisor ended and with the lock held: end what it left, and clean up."""
    record = read_record(layout)
    for name in end_leftovers(record):
        report("ended", {"service": name, "how": "left by a killed supervisor"})
    _remove_sockets(layout)
    if record is not None and not keep_sandboxes:
        report("cleaning", {"data": str(layout.data)})
        await purge(record.node, timeout)
    report("stopped", {"sandboxes": "left running" if keep_sandboxes else "stopped"})
