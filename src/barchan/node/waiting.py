"""Creates that wait for an image: a list shows them with how far it is, and a stop ends the wait.

None of it is durable: whoever waits asks again when the agent is gone, with the same key. What is not kept waiting by an image
leaves no trace here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec

from barchan.backends.base import Backend
from barchan.environments import PullProgress, Told
from barchan.errors import SandboxStopped
from barchan.node.info import describe, new_id
from barchan.node.rows import SandboxRow
from barchan.spec import SandboxInfo, SandboxSpec


def told_by(node: str, told: Told) -> Told:
    """The same, with who says it."""
    return lambda progress: told(msgspec.structs.replace(progress, node=node))


class Waiter:
    """A sandbox to be: the creates of one key. It has its id already."""

    def __init__(self, id: str, spec: SandboxSpec, key: str, progress: PullProgress) -> None:
        now = time.time()
        # Secrets are nobody's business before there is a sandbox.
        spec = msgspec.structs.replace(spec, secrets={})
        end = now + spec.lifetime
        self.row = SandboxRow(
            id=id, state="creating", spec=spec, create_key=key, digest=b"", created=now, last_used=now, expires=end
        )
        self.progress = progress
        self.tasks: set[asyncio.Task[object]] = set()
        self.reason = ""

    def info(self) -> SandboxInfo:
        return describe(self.row, self.progress)


class Waiting:
    """All of one agent. All methods belong to the event loop's thread."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._by_key: dict[str, Waiter] = {}

    async def settle(self, backend: Backend, spec: SandboxSpec, key: str, told: Told) -> tuple[SandboxSpec, str]:
        """`Backend.settle`, and the id that the sandbox was listed under meanwhile, "" if it was not.

        Raises `SandboxStopped` when that was stopped.
        """
        task = asyncio.current_task()
        assert task is not None
        waiter: Waiter | None = None

        def heard(progress: PullProgress) -> None:
            nonlocal waiter
            waiter = self._joined(spec, key, progress, task)
            told(progress)

        try:
            return await backend.settle(spec, told_by(self._node, heard)), waiter.row.id if waiter else ""
        except asyncio.CancelledError:
            if waiter is None or not waiter.reason:
                raise
            task.uncancel()
            raise SandboxStopped(f"sandbox {waiter.row.id} was stopped while it waited for an image") from None
        finally:
            if waiter is not None:
                self._leave(waiter, task)

    def _joined(self, spec: SandboxSpec, key: str, progress: PullProgress, task: asyncio.Task[object]) -> Waiter:
        waiter = self._by_key.get(key)
        if waiter is None:
            waiter = self._by_key[key] = Waiter(new_id(self._node), spec, key, progress)
        waiter.progress = progress
        waiter.tasks.add(task)
        return waiter

    def _leave(self, waiter: Waiter, task: asyncio.Task[object]) -> None:
        waiter.tasks.discard(task)
        if not waiter.tasks:
            self._by_key.pop(waiter.row.create_key, None)

    def get(self, id: str) -> Waiter | None:
        return next((waiter for waiter in self._by_key.values() if waiter.row.id == id), None)

    def rows(self) -> Iterator[SandboxRow]:
        return (waiter.row for waiter in self._by_key.values())

    def progress(self, id: str) -> PullProgress | None:
        waiter = self.get(id)
        return None if waiter is None else waiter.progress

    async def stop(self, waiter: Waiter) -> SandboxInfo:
        """Whoever waits gets `SandboxStopped`. The image comes all the same."""
        waiter.reason = "stopped"
        for task in (tasks := tuple(waiter.tasks)):
            task.cancel()
        await asyncio.wait(tasks)
        return msgspec.structs.replace(
            waiter.info(), state="stopped", reason="stopped", ended=time.time(), pulling=None
        )
