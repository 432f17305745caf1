"""From an admitted request to a sandbox that answers: one per key, one outcome each."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from barchan.backends.base import Launch, Running
from barchan.errors import (
    BarchanError,
    Conflict,
    CreateFailed,
    NodeUnavailable,
    SandboxError,
    SandboxStopped,
    SandboxUnavailable,
)
from barchan.kernel import processes
from barchan.node.info import describe, new_id
from barchan.node.machine import advance
from barchan.node.registry import Claim, SandboxRow
from barchan.node.rows import Made
from barchan.node.sandbox import LiveSandbox
from barchan.spec import Limits, SandboxInfo, SandboxSpec, SandboxState

if TYPE_CHECKING:
    from barchan.node.agent import Agent


class Wanted(NamedTuple):
    """A request for a sandbox."""

    spec: SandboxSpec
    """Settled (`Backend.settle`)."""
    asked: SandboxSpec
    """As its caller says it: by this a repeated key is known."""
    key: str
    id: str = ""
    """By which it was listed already; "" for a new one."""


_CREATING: tuple[SandboxState, ...] = ("creating",)


class Creation:
    """The part of an agent that makes sandboxes."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._making: dict[str, asyncio.Task[SandboxInfo]] = {}
        self.claiming: dict[str, asyncio.Task[tuple[str, asyncio.Task[SandboxInfo] | None]]] = {}
        """By key."""
        self.admitted: list[Limits] = []
        """Of creates on their way into the registry."""

    async def create(self, wanted: Wanted) -> SandboxInfo:
        """Make a sandbox, or answer with the one that this key made. Returns when it answers."""
        key = wanted.key
        self.admitted.append(wanted.spec.limits)
        # A claim that is under way comes to its end, and its sandbox with it, also when its caller gives up meanwhile.
        claiming = self.claiming[key] = self._agent.spawn(self._claim(wanted, self.claiming.get(key)))
        id, task = await asyncio.shield(claiming)
        return await asyncio.shield(task) if task is not None else self._as_created(id)

    async def claimed(self, key: str) -> None:
        """Until the claim of this key that is under way is decided."""
        if (claiming := self.claiming.get(key)) is not None:
            await asyncio.wait([claiming])

    async def ended(self, id: str) -> None:
        """Until the making of this sandbox that is under way has come to its end."""
        if (making := self._making.get(id)) is not None:
            await asyncio.wait([making])

    async def _claim(
        self, wanted: Wanted, earlier: asyncio.Task[Any] | None
    ) -> tuple[str, asyncio.Task[SandboxInfo] | None]:
        """The sandbox with this key, and its making if that is under way: it begins here if the sandbox is a new one.

        Of the first claim of a key nothing can come but a new sandbox: its container is made while the claim is written,
        or, if one was ready, before. What is made for a claim that fails, or that the end of the agent cuts short, has no
        row and is removed by its name.
        """
        began, id = time.perf_counter(), wanted.id or new_id(self._agent.config.name)
        spec, key = wanted.spec, wanted.key
        try:
            if earlier is not None:
                await asyncio.wait([earlier])
            making = None
            if self._agent.registry.by_key(key) is None:
                running = self._agent.backend(spec.backend).take(Launch(id=id, spec=spec))
                if running is None:
                    making = self._start(id, spec)
                elif await self._take(id, wanted, running, began):
                    return id, None
                else:
                    id = new_id(self._agent.config.name)
            return await self._claim_new(id, wanted, making, began)
        finally:
            self.admitted.remove(spec.limits)
            if self.claiming.get(key) is asyncio.current_task():
                del self.claiming[key]

    def _start(self, id: str, spec: SandboxSpec) -> asyncio.Task[Running]:
        return self._agent.spawn(self._agent.backend(spec.backend).create(Launch(id=id, spec=spec)))

    async def _take(self, id: str, wanted: Wanted, running: Running, began: float) -> bool:
        """Claim a sandbox that was ready, and meanwhile ask whether it answers: one entry in the registry says that it is.

        False if it does not; then there is no such entry.
        """
        sandbox = self._living(id, wanted.spec)
        claiming = asyncio.get_running_loop().create_task(self._claim_made(sandbox, wanted, running, began))
        try:
            await sandbox.connect()
        except (BarchanError, OSError) as error:
            await claiming
            await self._give_back(id, sandbox, error)
            return False
        except asyncio.CancelledError:
            claiming.cancel()
            sandbox.close(NodeUnavailable("the node agent is ending"))
            raise
        await claiming
        self._agent.serve(sandbox)
        return True

    def _living(self, id: str, spec: SandboxSpec) -> LiveSandbox:
        agent = self._agent
        return LiveSandbox(id, spec, spec.secrets, agent.backend(spec.backend), agent.recorder, agent.broken)

    async def _give_back(self, id: str, sandbox: LiveSandbox, error: Exception) -> None:
        await self._discard(id, sandbox, error)
        await self._agent.registry.remove(id)
        await self._agent.recorder.stop(id, str(error), failed=True)
        self._agent.recorder.forget(id)

    async def _claim_made(self, sandbox: LiveSandbox, wanted: Wanted, running: Running, began: float) -> None:
        id, now = sandbox.id, time.time()
        spec, asked, key, _ = wanted
        recorded = asyncio.ensure_future(self._agent.recorder.create(id, spec, key))
        made, expires = _made(running, began), now + spec.lifetime
        try:
            claim = await self._agent.registry.claim(
                id, spec, asked=asked, create_key=key, created=now, expires=expires, state="ready", made=made
            )
            sandbox.known = claim.synced
            await recorded
        except BarchanError as error:
            await asyncio.wait([recorded])
            await self._discard(id, sandbox, error)
            await self._agent.recorder.stop(id, str(error), failed=True)
            self._agent.recorder.forget(id)
            raise
        except asyncio.CancelledError:
            sandbox.close(NodeUnavailable("the node agent is ending"))
            raise

    async def _discard(self, id: str, sandbox: LiveSandbox, error: Exception) -> None:
        sandbox.close(error if isinstance(error, BarchanError) else SandboxUnavailable(str(error)))
        await self._agent.backend(sandbox.spec.backend).destroy(id)

    async def _claim_new(
        self, id: str, wanted: Wanted, making: asyncio.Task[Running] | None, began: float
    ) -> tuple[str, asyncio.Task[SandboxInfo] | None]:
        now = time.time()
        spec, asked, key, _ = wanted
        try:
            claim = await self._agent.registry.claim(
                id, spec, asked=asked, create_key=key, created=now, expires=now + spec.lifetime
            )
        except BarchanError:
            if making is not None:
                await asyncio.wait([making])
                await self._agent.backend(spec.backend).destroy(id)
            raise
        if claim.fresh:
            self._making[id] = self._agent.spawn(self._make(claim, spec, making or self._start(id, spec), began))
        return claim.row.id, self._making.get(claim.row.id)

    async def _make(self, claim: Claim, spec: SandboxSpec, making: asyncio.Task[Running], began: float) -> SandboxInfo:
        row = claim.row
        try:
            recorded = asyncio.ensure_future(self._agent.recorder.create(row.id, spec, row.create_key))
            try:
                running = await making
            finally:
                await recorded
            sandbox = self._living(row.id, spec)
            sandbox.known = claim.synced
            await sandbox.connect()
            made = _made(running, began)
            self._agent.serve(sandbox)
            state = advance("creating", "ready").state
            await self._agent.registry.update(
                row.id, when=_CREATING, durable=False, state=state, last_used=time.time(), **made
            )
        except Conflict:
            return await self._stopped_while_creating(row.id)
        except (BarchanError, OSError) as error:
            raise await self._failed(row, error) from error
        finally:
            self._making.pop(row.id, None)
        return self._agent.get(row.id)

    async def _failed(self, row: SandboxRow, error: Exception) -> BarchanError:
        """Remove what was made and say so in the registry. Returns the error for the caller."""
        typed = _of_create(error)
        step = advance(self._agent.row(row.id).state, "failed")
        if step.action != "remove":
            return typed  # it is being stopped: that removes it
        self._agent.forget(row.id, typed)
        await self._agent.backend(row.spec.backend).destroy(row.id)
        await self._agent.registry.update(row.id, state=advance(step.state, "cleaned").state, reason=str(typed))
        await self._agent.recorder.stop(row.id, str(typed), failed=True)
        self._agent.recorder.forget(row.id)
        return typed

    async def _stopped_while_creating(self, id: str) -> SandboxInfo:
        row = self._agent.row(id)
        if row.state in ("failing", "failed"):
            raise CreateFailed(f"sandbox {id} could not be created: {row.reason}")
        raise SandboxStopped(f"sandbox {id} was stopped while it was being created: {row.reason}")

    def _as_created(self, id: str) -> SandboxInfo:
        """The answer to a repeated create key."""
        row = self._agent.row(id)
        if row.state == "failed":
            raise CreateFailed(f"sandbox {id} could not be created: {row.reason}", hint="use a new key to try again")
        if row.state in ("stopping", "stopped"):
            raise SandboxStopped(f"sandbox {id} of this key is {row.state}: {row.reason}", hint="use a new key")
        return describe(row)


def _of_create(error: Exception) -> BarchanError:
    """What a caller of `create` gets: a sandbox that died young is no sandbox of theirs yet."""
    if isinstance(error, SandboxError):
        return CreateFailed(error.message, phase=error.phase, hint=error.hint)
    return error if isinstance(error, BarchanError) else CreateFailed(str(error))


def _made(running: Running, began: float) -> Made:
    return Made(
        pid=running.pid,
        pid_start=running.pid_start,
        cgroup=running.place,
        boot=processes.boot_id(),
        ready_ms=(time.perf_counter() - began) * 1000,
        handles=running.handles,
    )
