"""The node agent: the sandboxes of one host, from request to removal.

It decides by `machine` and `admission` (pure), acts through a backend, and keeps two durable things: the registry (what
exists) and the recorder (what happened). It may be killed at any moment; `recovery` takes up what runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any

import msgspec

from barchan import _version
from barchan.backends.base import Backend, Layered, Metered
from barchan.config import NodeConfig
from barchan.environments import EnvironmentRef, Told, untold
from barchan.errors import (
    BarchanError,
    ExecNotFound,
    NodeUnavailable,
    NotSupported,
    SandboxNotFound,
    SandboxStopped,
    SandboxUnavailable,
)
from barchan.kernel import processes
from barchan.locks import EnvironmentLock
from barchan.node.admission import Room, admit
from barchan.node.creation import Creation, Wanted
from barchan.node.execution import Execution
from barchan.node.info import describe
from barchan.node.listing import page, wants_ended
from barchan.node.machine import Event, advance
from barchan.node.packing import Packing
from barchan.node.past import gone
from barchan.node.recorder import CLOCK_SLACK, Recorder
from barchan.node.registry import Registry, SandboxRow
from barchan.node.sandbox import LiveSandbox
from barchan.node.waiting import Waiting, told_by
from barchan.spec import (
    BackendName,
    NodeInfo,
    NodeName,
    SandboxId,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    check_spec,
)
from barchan.trajectory.index import Rebuilt
from barchan.usage import SandboxStats
from barchan.wire import messages as m

logger = logging.getLogger(__name__)
HOST_SECONDS = 0.25


class Agent:
    """All methods belong to the event loop's thread."""

    def __init__(
        self, config: NodeConfig, registry: Registry, recorder: Recorder, backends: dict[BackendName, Backend]
    ) -> None:
        self.config = config
        self.registry = registry
        self.recorder = recorder
        self.backends = backends
        self.sandboxes: dict[str, LiveSandbox] = {}
        self.creation = Creation(self)
        self.waiting = Waiting(config.name)
        self.packing = Packing(self)
        self._ending: dict[str, asyncio.Task[SandboxInfo]] = {}
        self._going: dict[str, tuple[SandboxState, str]] = {}
        """What the registry is about to say of those that end: state and reason."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._host_seen = (processes.Memory(0, 0), 0, 0)
        self._host_until = 0.0

    # --- verbs

    async def create(self, request: m.CreateSandbox, told: Told = untold) -> SandboxInfo:
        """Make a sandbox, or answer with the one that this key made. Returns when it answers."""
        asked = spec = check_spec(request.spec)
        id = ""
        if self.registry.by_key(request.key) is None:
            spec, id = await self.waiting.settle(self.backend(asked.backend), asked, request.key, told)
            admit(self._room(), spec.limits)
        return await self.creation.create(Wanted(spec, asked, request.key, id))

    async def stop(self, id: str, reason: str = "stopped", event: Event = "stop") -> SandboxInfo:
        """End it and remove everything of it. Idempotent."""
        if (waiting := self.waiting.get(id)) is not None:
            return await self.waiting.stop(waiting)
        row = self.row(id)
        if row.state in ("stopped", "failed") and id not in self._ending:
            return describe(row)
        if id not in self._ending:
            self._ending[id] = self.spawn(self._end(row, event, reason))
        return await asyncio.shield(self._ending[id])

    def get(self, id: str) -> SandboxInfo:
        waiting = self.waiting.get(id)
        return describe(self.row(id)) if waiting is None else waiting.info()

    def list(self, request: m.ListSandboxes) -> tuple[SandboxInfo, ...]:
        """A page of those to which everything in the request applies."""
        rows = self.registry.rows() if wants_ended(request) else self.registry.live()
        found = page((*rows, *self.waiting.rows()), request, self.config.name)
        return tuple(describe(row, self.waiting.progress(row.id)) for row in found)

    async def stats(self, id: str) -> SandboxStats:
        """What it uses. Does not count as use."""
        row = self.row(id)
        if id not in self.sandboxes:
            self.live(id)  # says why it has nothing to measure
        backend = self.backend(row.spec.backend)
        if not backend.abilities.stats or not isinstance(backend, Metered):
            raise NotSupported(f"the {row.spec.backend} backend does not measure its sandboxes", field="backend")
        used = await backend.measure(id)
        return SandboxStats(id=SandboxId(id), since=row.created, at=time.time(), **used._asdict())

    async def renew(self, request: m.RenewSandbox) -> SandboxInfo:
        row = self.row(request.sandbox)
        self.live(row.id)
        if request.idle_timeout is not None or request.lifetime is not None:
            changed = {k: v for k in ("idle_timeout", "lifetime") if (v := getattr(request, k)) is not None}
            spec = check_spec(_replace(row.spec, changed))
            expires = row.created + spec.lifetime
            await self.registry.update(row.id, spec=spec, expires=expires)
        return self.get(row.id)

    def live(self, id: str) -> LiveSandbox:
        """The sandbox, ready for an operation; counts as use. Raises a typed error when it is not."""
        sandbox = self.sandboxes.get(id)
        if sandbox is not None:
            self.registry.touch(id, time.time())
            return sandbox
        row = self.row(id)
        if row.state in ("failing", "failed"):
            raise SandboxUnavailable(f"sandbox {id} failed: {row.reason}")
        if row.state in ("stopping", "stopped"):
            why = f": {row.reason}" if row.reason not in ("", row.state) else ""
            raise SandboxStopped(f"sandbox {id} is {row.state}{why}")
        raise SandboxUnavailable(f"sandbox {id} is {row.state}", hint="wait until it is ready")

    def node_info(self) -> NodeInfo:
        backend = next(iter(self.backends.values()))
        room = self._room()
        return NodeInfo(
            name=NodeName(self.config.name),
            backends=tuple(self.backends),
            kernel="reduced" if backend.abilities.kernel == "reduced" else "full",
            sandboxes=room.sandboxes,
            capacity=room.most_sandboxes,
            memory_total=room.memory,
            memory_promised=room.memory_promised,
            disk_total=room.disk,
            disk_promised=room.disk_promised,
            cpus_total=len(os.sched_getaffinity(0)),
            version=_version.__version__,
            notes=backend.abilities.notes,
            data_mounts=tuple(sorted(self.config.data_mounts)),
            pool=backend.pool(),
            network=backend.abilities.network,
        )

    def hello(self) -> m.Hello:
        rows = self.registry.live()
        keys = {row.create_key: row.id for row in rows if row.create_key}
        return m.Hello(info=self.node_info(), sandboxes=tuple(row.id for row in rows), create_keys=keys)

    async def environments(self) -> tuple[m.EnvironmentInfo, ...]:
        return await next(iter(self.backends.values())).environments()

    async def lock(self, environment: EnvironmentRef) -> EnvironmentLock:
        return await self._layered().lock(environment)

    async def pull(self, request: m.PullImage, told: Told = untold) -> m.EnvironmentInfo:
        heard = told_by(self.config.name, told)
        return await self._layered().pull(request.image, heard, again=request.again)

    def _layered(self) -> Layered:
        backend = next(iter(self.backends.values()))
        if not isinstance(backend, Layered):
            raise NotSupported("environments of this node are no layers", field="environment")
        return backend

    async def abandon(self, key: str) -> None:
        """Whoever asked for this sandbox does not want it any more. Returns when it is gone."""
        await self.creation.claimed(key)
        row = self.registry.by_key(key)
        if row is not None and not self._closing:
            await self.stop(row.id, "its creation was cancelled")

    async def close(self) -> None:
        """Let go of every sandbox; they go on running."""
        self._closing = True
        for id in list(self.sandboxes):
            self.forget(id, NodeUnavailable("the node agent is ending"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- what is recorded

    async def commands(self, id: str) -> Rebuilt:
        """Its commands, also when it has ended. Raises `SandboxNotFound` once nobody remembers it."""
        row = self.row(id)
        return await self.recorder.commands(id, bool(row.ended), row.created - CLOCK_SLACK)

    async def ended_exec(self, id: str, exec_id: str) -> Execution:
        """A command of a sandbox that has ended. Raises `ExecNotFound`, `RecordGone`."""
        known = await self.commands(id)
        state = known.execs.get(exec_id)
        if state is None and known.whole:
            raise ExecNotFound(f"no command {exec_id}", field="id")
        if state is None or not state.ended:
            raise gone(id, f"command {exec_id}")
        return Execution.from_log(id, state, await self.recorder.result_of(state), self.recorder)

    # --- ending

    def serve(self, sandbox: LiveSandbox) -> None:
        """It answers: operations reach it, and its end is noticed."""
        self.sandboxes[sandbox.id] = sandbox
        backend = self.backend(sandbox.spec.backend)
        backend.watch(
            sandbox.id, lambda reason: self.broken(sandbox.id, reason)
        )  # last: `broken` knows it from here on

    def broken(self, id: str, reason: str) -> None:
        """Its first process died or its guest cannot be trusted: it ends as failed."""
        if id in self.sandboxes and id not in self._ending:
            logger.warning("sandbox %s failed: %s", id, reason)
            self._ending[id] = self.spawn(self._end(self.row(id), "lost", reason))

    async def _end(self, row: SandboxRow, event: Event, reason: str) -> SandboxInfo:
        try:
            step = advance(self.row(row.id).state, event)
            if step.action != "remove":
                return self.get(row.id)
            self._going[row.id] = (step.state, reason)
            # Not waited for: an agent that dies before this is written finds a sandbox whose first process ended.
            young = row.state == "creating"
            marked = self.registry.update(row.id, durable=False, hurried=young, state=step.state, reason=reason)
            try:
                if young:
                    await marked
                    await self.creation.ended(row.id)
                await self._remove(row, step.state, reason)
            except BaseException:
                await marked
                raise
            # The record has its end, durably; the registry's entry follows it, also after a power cut. Secrets are erased now.
            ended = self.registry.update(
                row.id, durable=bool(row.spec.secrets), state=advance(step.state, "cleaned").state, reason=reason
            )
            await marked
            await ended
            self._going.pop(row.id, None)
            self.recorder.forget(row.id)
            return self.get(row.id)
        finally:
            self._going.pop(row.id, None)
            self._ending.pop(row.id, None)

    async def _remove(self, row: SandboxRow, state: SandboxState, reason: str) -> None:
        """Its commands get an end, it is removed, and the record says so."""
        kind = SandboxUnavailable if state == "failing" else SandboxStopped
        error = kind(f"sandbox {row.id}: {reason}")
        sandbox = self.forget(row.id, error)
        if sandbox is not None:
            await sandbox.give_up_all(error)
        recorded = asyncio.ensure_future(self.recorder.stop(row.id, reason, failed=state == "failing"))
        try:
            await self.backend(row.spec.backend).destroy(row.id)
        finally:
            await recorded

    def forget(self, id: str, error: BarchanError) -> LiveSandbox | None:
        sandbox = self.sandboxes.pop(id, None)
        if sandbox is not None:
            sandbox.close(error)
        return sandbox

    # --- small things

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that the agent keeps alive and whose failure is never silent."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, BarchanError):
            logger.error("background work failed", exc_info=error)

    def row(self, id: str) -> SandboxRow:
        waiting = self.waiting.get(id)
        row = self.registry.get(id) if waiting is None else waiting.row
        if row is None:
            raise SandboxNotFound(f"no sandbox {id}", field="sandbox")
        if id in self._going:
            state, reason = self._going[id]
            return msgspec.structs.replace(row, state=state, reason=reason)
        return row

    def backend(self, name: BackendName) -> Backend:
        backend = self.backends.get(name)
        if backend is None:
            raise NotSupported(
                f"this node has no {name} backend", field="backend", hint=f"it has: {', '.join(self.backends)}"
            )
        return backend

    def _host(self) -> tuple[processes.Memory, int, int]:
        """Its memory, free process ids and open files, not older than `HOST_SECONDS`."""
        if time.monotonic() >= self._host_until:
            self._host_seen = (processes.memory(), processes.pids_free(), processes.files_free())
            self._host_until = time.monotonic() + HOST_SECONDS
        return self._host_seen

    def _room(self) -> Room:
        promised = self.registry.promised
        memory, pids_free, files_free = self._host()
        space = next(iter(self.backends.values())).space()
        return Room(
            sandboxes=promised.sandboxes + len(self.creation.admitted),
            most_sandboxes=self.config.max_sandboxes,
            memory=int(memory.total * self.config.memory_share * self.config.memory_overcommit),
            memory_promised=promised.memory + sum(limits.memory for limits in self.creation.admitted),
            memory_available=memory.available,
            disk=int(space.size * self.config.disk_overcommit),
            disk_promised=promised.disk + sum(limits.disk for limits in self.creation.admitted),
            disk_size=space.size,
            disk_free=space.free,
            pids_free=pids_free,
            files_free=files_free,
        )


def _replace(spec: SandboxSpec, changes: dict[str, float]) -> SandboxSpec:
    return msgspec.structs.replace(spec, **changes)
