"""Making layers of what sandboxes have changed: one outcome for each key, however often it is asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from barchan.backends.base import Pack, Packable
from barchan.errors import BarchanError, Conflict, NotSupported
from barchan.node.registry import SandboxRow
from barchan.packing import PackedLayer, PackOrder
from barchan.wire import messages as m
from barchan.wire.link import Incoming

if TYPE_CHECKING:
    from barchan.node.agent import Agent


@dataclass(eq=False)
class _Work:
    order: PackOrder
    task: asyncio.Task[PackedLayer]
    waiting: int = 0
    """Callers."""


class Packing:
    """The part of an agent that packs."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._under_way: dict[tuple[str, str], _Work] = {}
        """By sandbox and key."""

    async def pack(self, request: m.PackDiff, call: Incoming) -> PackedLayer:
        """It goes on while anybody waits, and when only the connection of the last one is lost."""
        row = self._agent.row(request.sandbox)
        work = self._work(row, request)
        work.waiting += 1
        try:
            return await asyncio.shield(work.task)
        except asyncio.CancelledError:
            if work.waiting == 1 and not call.link_lost:
                work.task.cancel()
            raise
        finally:
            work.waiting -= 1

    def _work(self, row: SandboxRow, request: m.PackDiff) -> _Work:
        under = (row.id, request.key)
        work = self._under_way.get(under)
        if work is None:
            task = self._agent.spawn(self._pack(self._packable(row), row, request))
            work = self._under_way[under] = _Work(request.order, task)
            task.add_done_callback(lambda _: self._under_way.pop(under))
        elif work.order != request.order:
            raise Conflict(f"key {request.key} was used for a different request", hint="use a new key", field="key")
        return work

    def _packable(self, row: SandboxRow) -> Packable:
        backend = self._agent.backend(row.spec.backend)
        if not backend.abilities.pack or not isinstance(backend, Packable):
            raise NotSupported(f"the {row.spec.backend} backend does not pack its sandboxes", field="backend")
        return backend

    async def _pack(self, backend: Packable, row: SandboxRow, request: m.PackDiff) -> PackedLayer:
        recorder, wanted = self._agent.recorder, Pack(id=row.id, spec=row.spec, key=request.key, order=request.order)
        if row.id not in self._agent.sandboxes and (made := await backend.packed(wanted)) is not None:
            return made
        sandbox = self._agent.live(row.id)
        intent = await recorder.begin_pack(row.id, request.key, request.order)
        if intent.packed is not None:
            return intent.packed
        sandbox.packings += 1
        try:
            # What an agent that was killed has made, it may not have recorded.
            made = await backend.packed(wanted) if intent.repeated else None
            made = made or await backend.pack(wanted)
        except BarchanError as error:
            await recorder.end_pack(row.id, request.key, None, error.code)
            if row.id not in self._agent.sandboxes:
                self._agent.live(row.id)  # says how it ended
            raise
        except asyncio.CancelledError:
            await recorder.end_pack(row.id, request.key, None, "cancelled")
            raise
        finally:
            sandbox.packings -= 1
        await recorder.end_pack(row.id, request.key, made)
        return made
