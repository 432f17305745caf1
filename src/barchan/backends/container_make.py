"""Making containers: at once for a request, or ahead of requests (`pool.Maker`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from barchan.backends.container_data import DataMounts
from barchan.backends.container_steps import Draft, Endpoint, Groups, HostIds, Layers, Order, Sizes, Writable
from barchan.backends.removals import Removals
from barchan.backends.spawner import TIMES, ParkRequest, Spawned, Spawner, SpawnFlag, SpawnRequest, install_guest
from barchan.backends.steps import Steps
from barchan.config import NodeConfig
from barchan.errors import CreateFailed, SandboxUnavailable
from barchan.kernel import processes
from barchan.kernel.cgroups import GroupTree
from barchan.kernel.idranges import IdRanges
from barchan.kernel.scratch import Scratch
from barchan.layers.mount import LayerMounts
from barchan.spec import MIB, Limits, SandboxSpec

logger = logging.getLogger(__name__)
T = TypeVar("T")
ATTACH = TIMES.index("cgroups")
SHM_SHARE = 4
"""/dev/shm may hold this part of the memory limit; its pages count against it."""
OOM_SCORE = 300
"""Sandboxes go before the host's own processes."""
_PARKED_LOST = ("parked", "spawner", "child-died")
"""Phases in which a parked child fails by itself: another is made."""


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
    ) -> None:
        self._config = config
        self._native = native
        self._reduced = reduced
        ids = HostIds(ranges, config.uid_first, config.uid_count)
        endpoint = Endpoint(config.layout.guest_sockets)
        data = DataMounts(config.data_mounts, config.layout.run / "nothing")
        self._place: Steps[Draft] = Steps((ids, Groups(tree), Writable(scratch), endpoint))
        self._files: Steps[Draft] = Steps((Sizes(tree, scratch), Layers(mounts), data))
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="container")
        self.removals = Removals(self._place.undo, self._threads)
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
            if error.phase != HostIds.name or not self.removals.pending:
                raise
        await self.removals.drain()
        return await self._furnish(Draft(id, order.spec.limits), order)

    async def _furnish(self, draft: Draft, order: Order) -> Draft:
        draft.order = order
        try:
            await self.in_thread(lambda: self._prepare(draft))
            child = await (await self._live_spawner()).spawn(self._request(draft, order.spec))
        except BaseException:
            await asyncio.shield(self.discard(draft))
            raise
        self._threads.submit(draft.release)
        if draft.child is not None:
            os.close(draft.pidfd)
        self.times.add(child)
        draft.child, draft.born = child, processes.start_time(child.pid)
        return draft

    def _prepare(self, draft: Draft) -> None:
        if draft.child is None:
            self._place.do(draft)
        self._files.do(draft)

    # --- ahead of requests
    async def park(self, limits: Limits) -> Draft:
        draft = self._new_ahead(limits)
        try:
            await self.in_thread(lambda: self._place.do(draft))
            assert draft.ids is not None and draft.group is not None
            request = ParkRequest(
                uid_base=draft.ids.base,
                uid_count=draft.ids.size,
                guest_uid=draft.ids.guest,
                oom_score_adj=OOM_SCORE,
                cgroup=draft.group.dir_fd,
                groups=draft.group.tasks_fds,
            )
            draft.child = await (await self._live_spawner()).park(request)
            self.times.add(draft.child, whole=False)
        except BaseException:
            await asyncio.shield(self.discard(draft))
            raise
        return draft

    async def furnish(self, order: Order) -> Draft:
        return await self._furnish(self._new_ahead(order.spec.limits), order)

    def _undo(self, draft: Draft) -> None:
        draft.close()
        self._place.undo(draft.name)

    def _new_ahead(self, limits: Limits) -> Draft:
        draft = Draft(f"pool-{secrets.token_hex(8)}", limits)
        self.ahead.add(draft.name)
        return draft

    async def discard(self, draft: Draft) -> None:
        if draft.child is not None:
            await self.end(draft.pidfd)
        await self.in_thread(lambda: self._undo(draft))
        self.ahead.discard(draft.name)

    def _request(self, draft: Draft, spec: SandboxSpec) -> SpawnRequest:
        flags = SpawnFlag.VOLATILE
        flags |= SpawnFlag.SETUID if spec.setuid else SpawnFlag(0)
        flags |= SpawnFlag.PTRACE if spec.ptrace else SpawnFlag(0)
        flags |= SpawnFlag.REDUCED if self._reduced else SpawnFlag(0)
        assert draft.ids is not None and draft.group is not None and draft.listener is not None
        return SpawnRequest(
            uid_base=draft.ids.base,
            uid_count=draft.ids.size,
            guest_uid=draft.ids.guest,
            flags=flags,
            hostname=spec.hostname,
            shm_bytes=max(spec.limits.memory // SHM_SHARE, MIB),
            oom_score_adj=OOM_SCORE,
            listener=draft.listener.fileno(),
            writable=draft.tree_fd,
            cgroup=draft.group.dir_fd,
            groups=tuple(draft.group.tasks_fds),
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
                start = Spawner.start(self._native / "spawner", self._guest, self._config.uid_first - 1)
                self._spawner = await self._spawner_context.enter_async_context(start)
            return self._spawner

    # --- ending

    async def end(self, pidfd: int) -> None:
        """Kill the first process and wait for it: the kernel ends all others with it."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.remove_reader(pidfd)
        loop.add_reader(pidfd, gone.set)
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await asyncio.wait_for(gone.wait(), 30)
        except TimeoutError as error:
            raise SandboxUnavailable("its first process does not die", phase="stop") from error
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    async def remove(self, place: str) -> None:
        """Everything there is of a place. Idempotent."""
        await self.in_thread(lambda: self._place.undo(place))

    async def close(self) -> None:
        await self.removals.close()
        await self._spawner_context.aclose()
        self._threads.shutdown()

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
