"""Many sandboxes by one request."""

from __future__ import annotations

from typing import Self

import msgspec

from barchan.errors import BarchanError, RequestTimeout, from_body
from barchan.sdk import _compat
from barchan.sdk._connection import TRANSIENT, Connection
from barchan.sdk._results import CreateFailure
from barchan.sdk._sandbox import Sandbox
from barchan.sdk._values import packed
from barchan.wire.link import Link
from barchan.wire.many import Arrivals
from barchan.wire.messages import CancelMany, Created, CreateMany
from barchan.wire.transports import CLOSE_WAIT


@_compat.exclusive
class Batch:
    """What `create_many` returns: `async with` it, and iterate over the sandboxes in the order in which they become ready.

    A sandbox is yours from the moment the loop gives it to you: it goes on after the block, until you stop it. Leaving the
    block early, or losing the client, ends the batch: no more are made, and those that were made and not given to you are
    removed. A lost connection is dialled again and the batch goes on; those that you have not got yet are removed when the
    client does not come back within 90 seconds. At most 256 are made ahead of what you have taken.

    Iterating raises what concerns the request as a whole (`InvalidRequest`, `ApiUnavailable`, `Conflict` when another call
    goes on with the same key). What concerns one sandbox is collected in `failures`.
    """

    def __init__(self, connection: Connection, request: CreateMany, timeout: float | None) -> None:
        self.failures: list[CreateFailure] = []
        """Of those that came so far."""
        self._connection = connection
        self._request = request
        self._timeout = timeout
        self._done: set[int] = set()
        self._mine: set[int] = set()
        self._arrivals: Arrivals | None = None

    @property
    def key(self) -> str:
        """Iterating over a batch of the same key, count and values gives the same sandboxes, also in another process."""
        return self._request.key

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        arrivals = self._arrivals
        if arrivals is None or arrivals.complete:
            return
        try:
            await self._cancel(CLOSE_WAIT)
        finally:
            arrivals.abandon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sandbox:
        while True:
            created = await self._connection.attempts(self._next)
            if created is None:
                raise StopAsyncIteration
            self._done.add(created.index)
            if created.sandbox is not None:
                self._mine.add(created.index)
                return Sandbox(self._connection, created.sandbox, self._timeout)
            self._fail(created)

    async def all(self) -> tuple[Sandbox, ...]:
        """All of them, or none: when one cannot be made, every other is removed and its error is raised."""
        found, whole = [], False
        try:
            async for sandbox in self:
                found.append(sandbox)
                if self.failures:
                    break
            whole = not self.failures
        finally:
            if not whole:
                self._mine.clear()
                await self._cancel(self._timeout)
        if self.failures:
            raise self.failures[0].error
        return tuple(found)

    async def _next(self, link: Link) -> Created | None:
        if self._arrivals is None or isinstance(self._arrivals.error, TRANSIENT):
            request = msgspec.structs.replace(self._request, done=tuple(sorted(self._done)))
            arrivals = self._arrivals = Arrivals()
            arrivals.follow(link.call(packed(request), arrivals.on_frame))
        return await self._arrivals.next()

    def _fail(self, created: Created) -> None:
        error = from_body(created.error) if created.error is not None else BarchanError("no reason was given")
        self.failures.append(CreateFailure(index=created.index, error=error, queued_ms=created.queued_ms))

    async def _cancel(self, seconds: float | None) -> None:
        """End it, but for what was given. Waits for the answer: what only was sent may be lost with the connection."""
        error = self._arrivals.error if self._arrivals is not None else None
        if error is not None and not isinstance(error, TRANSIENT):
            return  # it never began, or is another call's now
        request = CancelMany(key=self.key, count=self._request.count, done=tuple(sorted(self._mine)))
        try:
            await self._connection.request(request, retry=True, timeout=seconds)
        except (*TRANSIENT, RequestTimeout):
            self._connection.post(request)
