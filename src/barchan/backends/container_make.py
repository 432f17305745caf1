"""Making containers: at once for a request, or ahead of requests (`pool.Maker`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from barchan.backends.container_data import DataMounts
from barchan.backends.container_net import OpenNetwork
from barchan.backends.container_steps import Draft, Files, Order, Sweep
from barchan.backends.removals import Removals
from barchan.backends.spawner import TIMES, Place, PlacedRequest, Places, Spawned, Spawner, SpawnFlag, install_guest
from barchan.config import NodeConfig
from barchan.errors import CreateFailed, FeatureMissing, SandboxUnavailable
from barchan.kernel import processes
from barchan.kernel.cgroups import GroupTree
from barchan.kernel.idranges import IdRanges
from barchan.kernel.scratch import Scratch
from barchan.layers.mount import LayerMounts
from barchan.networks import NetworkInfo
from barchan.spec import MIB, Limits, SandboxSpec

logger = logging.getLogger(__name__)
T = TypeVar("T")
ATTACH = TIMES.index("cgroups")
SHM_SHARE = 4
"""/dev/shm may hold this part of the memory limit; its pages count against it."""
END_SECONDS = 30
HURRY_SECONDS = 1.0
"""After these its limit of CPU time is taken away."""
OOM_SCORE = 300
"""Sandboxes go before the host's own processes."""
_PARKED_LOST = ("parked", "spawner", "child-died")
"""Phases in which a parked child fails by itself: another is made."""


@functools.cache
def _flags(setuid: bool, ptrace: bool, hosts: bool, reduced: bool) -> SpawnFlag:
    wanted = {
        SpawnFlag.SETUID: setuid,
        SpawnFlag.PTRACE: ptrace,
        SpawnFlag.HOSTS: hosts,
        SpawnFlag.REDUCED: reduced,
    }
    return functools.reduce(SpawnFlag.__or__, (flag for flag, on in wanted.items() if on), SpawnFlag.VOLATILE)


class Times:
    """What the spawner said about its work, summed up."""

    def __init__(self) -> None:
        self._containers = 0
        self._total = self._attach = 0

    def add(self, child: Spawned, *, whole: bool = True) -> None:
        """Not `whole`: it was only parked; the rest of its time comes with its order."""
        self._containers += whole
        self._total += max(child.times_us)
        self._attach += child.times_us[ATTACH]

    @property
    def total_ms(self) -> float:
        """Mean over the containers made."""
        return round(self._total / 1000 / max(self._containers, 1), 3)

    @property
    def attach_ms(self) -> float:
        return round(self._attach / 1000 / max(self._containers, 1), 3)


class ContainerMaker:
    """Owns the spawner and the threads in which the blocking steps run."""

    def __init__(
        self,
        config: NodeConfig,
        ranges: IdRanges,
        tree: GroupTree,
        scratch: Scratch,
        mounts: LayerMounts,
        *,
        native: Path,
        reduced: bool,
        tell: Callable[[NetworkInfo], None] = lambda info: None,
    ) -> None:
        self._config = config
        self._native = native
        self._reduced = reduced
        self.network = OpenNetwork(config, ranges, self._slot, tell)
        self._files = Files(mounts, DataMounts(config.data_mounts, config.layout.run / "nothing"), self.network)
        self._tree = tree
        self._scratch = scratch
        self._places = Places(
            ids=ranges.directory,
            unified=tree.unified,
            v1=tree.parents_v1,
            trees=scratch.root,
            instance=ranges.instance,
            uid_first=config.uid_first,
            uid_size=config.uid_count,
            slots=ranges.slots,
        )
        self._sweep = Sweep(ranges, self.network, tree, scratch)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="container")
        self.removals = Removals(self._remove_places, self._sweep, self._threads, self._reclaim)
        self._spawner: Spawner | None = None
        self._spawner_context = contextlib.AsyncExitStack()
        self._spawner_lock = asyncio.Lock()
        self._guest = install_guest(native / "guest", config.layout.run)
        self.times = Times()
        self.ahead: set[str] = set()
        """Places that no sandbox has yet."""

    async def finish(self, parked: Draft | None, order: Order, id: str) -> Draft:
        """A whole container, from a parked child or at the place `id`. On any error nothing is left behind."""
        if parked is not None:
            try:
                return await self._furnish(parked, order)
            except CreateFailed as error:
                if error.phase not in _PARKED_LOST:
                    raise
        try:
            return await self._furnish(Draft(id, order.spec.limits), order)
        except CreateFailed as error:
            if error.phase != "ids" or not self.removals.pending:
                raise
        await self.removals.drain()
        return await self._furnish(Draft(id, order.spec.limits), order)

    async def _furnish(self, draft: Draft, order: Order) -> Draft:
        draft.order = order
        try:
            if not self._files.at_once(draft):
                await self.in_thread(lambda: self._files.open(draft))
            spawner = await self._live_spawner()
            child = await spawner.spawn(self._request(draft, order.spec), draft.release)
        except BaseException:
            await asyncio.shield(self.discard(draft))
            raise
        draft.made()
        if draft.child is not None:
            os.close(draft.pidfd)
        self.times.add(child)
        draft.child, draft.born = child, processes.start_time(child.pid)
        if order.spec.network.mode == "open":
            await self._connect(draft)
        return draft

    async def _connect(self, draft: Draft) -> None:
        """Before anybody has it: no program of a user starts without the network that it was promised."""
        try:
            await self.network.attach(draft.name, draft.pidfd)
        except BaseException:
            await asyncio.shield(self.discard(draft))
            raise

    # --- ahead of requests
    async def park(self, limits: Limits) -> Draft:
        draft = self._new_ahead(limits)
        place = Place(draft.name, self._tree.texts(limits), limits.disk)
        request = PlacedRequest(place=place, flags=SpawnFlag.PARK, oom_score_adj=OOM_SCORE)
        try:
            draft.child = await (await self._live_spawner()).park(request)
            self.times.add(draft.child, whole=False)
        except BaseException:
            await asyncio.shield(self.discard(draft))
            raise
        return draft

    async def furnish(self, order: Order) -> Draft:
        return await self._furnish(self._new_ahead(order.spec.limits), order)

    def _undo(self, draft: Draft) -> None:
        draft.made()
        self._sweep(draft.name)

    def _new_ahead(self, limits: Limits) -> Draft:
        draft = Draft(f"pool-{secrets.token_hex(8)}", limits)
        self.ahead.add(draft.name)
        return draft

    async def discard(self, draft: Draft) -> None:
        if draft.child is not None:
            await self.end(draft.pidfd, draft.name)
        await self.in_thread(lambda: self._undo(draft))
        self.ahead.discard(draft.name)

    def _slot(self, place: str) -> int:
        """Of its id range, written nowhere but in the owner of its group. `FileNotFoundError` when there is none."""
        return (os.stat(self._tree.unified / place).st_uid - self._config.uid_first) // self._config.uid_count

    def _request(self, draft: Draft, spec: SandboxSpec) -> PlacedRequest:
        kept = draft.child is not None and draft.limits == spec.limits
        draft.limits = spec.limits
        return PlacedRequest(
            place=Place(draft.name, () if kept else self._tree.texts(spec.limits), spec.limits.disk),
            flags=_flags(spec.setuid, spec.ptrace, spec.network.mode == "open", self._reduced),
            hostname=spec.hostname,
            shm_bytes=max(spec.limits.memory // SHM_SHARE, MIB),
            oom_score_adj=OOM_SCORE,
            layers=tuple(draft.layer_fds),
            data=tuple(draft.data),
            parked=draft.child.order if draft.child is not None else 0,
        )

    async def _live_spawner(self) -> Spawner:
        """The running spawner; one that died is replaced."""
        async with self._spawner_lock:
            if self._spawner is None or not self._spawner.alive:
                if self._spawner is not None:
                    logger.warning("the spawner died; starting another")
                await self._spawner_context.aclose()
                start = Spawner.start(self._native / "spawner", self._guest, self._config.uid_first - 1, self._places)
                self._spawner = await self._spawner_context.enter_async_context(start)
            return self._spawner

    # --- ending

    async def end(self, pidfd: int, name: str) -> None:
        """Kill the first process of a place and wait for it: the kernel ends all others with it."""
        loop = asyncio.get_running_loop()
        gone = loop.create_future()
        loop.add_reader(pidfd, _resolve, gone)
        slow = loop.call_later(HURRY_SECONDS, self._hurry, name)
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            async with asyncio.timeout(END_SECONDS):
                await gone
        except TimeoutError as error:
            raise SandboxUnavailable("its first process does not die", phase="stop") from error
        finally:
            slow.cancel()
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def _hurry(self, name: str) -> None:
        """To die costs time of the processor, and many processes may have used up what the sandbox has."""
        with contextlib.suppress(OSError):
            self._tree.named(name).unthrottle()

    async def remove(self, place: str) -> None:
        """Everything there is of a place, also what runs in it. Idempotent."""
        await self.in_thread(lambda: self._sweep(place))

    async def _remove_places(self, names: list[str]) -> list[str]:
        """Of places in which nothing runs; returns those of which something is left."""
        try:
            await self.network.release(names)  # while the slots are theirs
            return await (await self._live_spawner()).remove(names)
        except (CreateFailed, FeatureMissing, OSError) as error:
            logger.warning("nothing is removed at once: %s", error)
            return names

    async def close(self) -> None:
        await self.removals.close()
        await self._spawner_context.aclose()
        self._threads.shutdown()
        await self.network.close()

    async def _reclaim(self) -> None:
        """What a flood filled is its neighbours' again as soon as it was stopped."""
        try:
            if self._scratch.scarce():
                await self.in_thread(self._scratch.reclaim)
        except OSError as error:
            logger.warning("the scratch volume gives nothing back yet: %s", error)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
