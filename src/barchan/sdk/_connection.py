"""One WebSocket to the API, opened when first needed and again when lost, and the calls on it."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from random import random
from typing import Any, TypeVar

from barchan.errors import ApiUnavailable, BarchanError, NodeUnavailable
from barchan.sdk import _compat
from barchan.sdk._address import Address
from barchan.sdk._socket import Socket
from barchan.sdk._values import packed
from barchan.wire.frames import STDOUT
from barchan.wire.futures import Future
from barchan.wire.link import Call, FrameSink, Link, ignore_frame
from barchan.wire.messages import Request
from barchan.wire.streams import CallStreams, Taking
from barchan.wire.transports import CLOSE_WAIT

T = TypeVar("T")
TRANSIENT = (ApiUnavailable, NodeUnavailable)
"""What may be tried again when the request allows it."""
_FIRST_DELAY, _MOST_DELAY = 0.05, 1.0


class Patience:
    """Back-off with an end: waits longer each time, and gives up `seconds` after the first failure in a row."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None
        self._delay = _FIRST_DELAY

    def reset(self) -> None:
        """It worked."""
        self._until = None
        self._delay = _FIRST_DELAY

    async def wait(self, error: BarchanError) -> None:
        """Before the next try. Raises `error` when there shall be none."""
        now = _compat.monotonic()
        if self._until is None:
            self._until = now + self._seconds
        if now >= self._until:
            raise error
        await _compat.sleep(min(self._delay * (0.5 + random()), self._until - now))
        self._delay = min(2 * self._delay, _MOST_DELAY)


class Connection:
    """`reconnect` is how many seconds a lost connection is dialled again before calls fail with `ApiUnavailable`."""

    def __init__(self, address: Address, *, reconnect: float, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self.reconnect = reconnect
        self.tasks: set[_compat.Task[Any]] = set()
        """Everything that runs beside the caller."""
        self._tls = tls
        self._socket: Socket | None = None
        self._dialling: _compat.Task[Link] | None = None
        self._posted: set[Future[Any]] = set()
        """Requests that nobody but `close` waits for."""
        self._worked = False
        self.closed = False

    async def link(self) -> Link:
        """The live link. Concurrent callers share one attempt to open it."""
        if self._socket is not None and self._socket.link.lost is None:
            return self._socket.link
        if self.closed:
            raise ApiUnavailable("the client is closed")
        if self._dialling is None or self._dialling.done():
            self._dialling = _compat.spawn(self.tasks, self._dial)
        return await _compat.joined(self._dialling)

    async def close(self) -> None:
        """Send what is waiting, hang up. Commands go on in their sandboxes."""
        # What the API has not begun when the connection ends it does not begin any more. And what was posted may have to dial
        # once more: an interrupt while something is being sent costs the connection.
        until = _compat.monotonic() + CLOSE_WAIT
        while self._posted and (left := until - _compat.monotonic()) > 0:
            await _compat.ended(self._posted, left)
        self.closed = True
        if self._socket is not None:
            await self._socket.close()
        await _compat.ended(self.tasks, CLOSE_WAIT)

    async def attempts(self, attempt: Callable[[Link], Awaitable[T]]) -> T:
        """Try again while the API or the node is away. For what may happen twice without harm."""
        patience = Patience(self.reconnect)
        while True:
            try:
                return await attempt(await self.link())
            except TRANSIENT as error:
                if self.closed or not self._worked:
                    raise
                await patience.wait(error)

    async def request(
        self, request: Request, *, retry: bool, timeout: float | None, on_frame: FrameSink = ignore_frame
    ) -> bytes:
        """The REPLY payload of a call without streams. Raises `RequestTimeout` after `timeout` seconds."""

        async def attempt(link: Link) -> bytes:
            return await answer(link.call(payload, on_frame))

        payload = packed(request)
        async with _compat.within(timeout, request.op):
            if retry:
                return await self.attempts(attempt)
            return await attempt(await self.link())

    async def fetch(self, request: Request, *, most: int = 1 << 62) -> bytes:
        """All bytes of stream 1 of a call that only reads. More than `most` is a `ProtocolError`."""

        async def attempt(link: Link) -> bytes:
            streams = CallStreams(outputs=(STDOUT,), taking=Taking.COLLECT, most=most, confirmed=True)
            call = link.call(payload, streams.on_frame)
            streams.follow(call)
            await answer(call)
            return streams.stdout.collected()

        payload = packed(request)
        return await self.attempts(attempt)

    def post(self, request: Request) -> None:
        """Send without waiting for the answer; when the connection is away, as soon as it is back.

        For what may happen twice without harm. `close` waits for it, though not long.
        """
        payload = packed(request)
        if self._socket is not None and self._socket.link.lost is None:
            sent = self._socket.link.call(payload).answer
            self._posted.add(sent)
            sent.add_done_callback(lambda sent: self._answered(sent, payload))
        else:
            self._post_again(payload)

    def _answered(self, sent: Future[bytes], payload: bytes) -> None:
        self._posted.discard(sent)
        if not sent.cancelled() and isinstance(sent.exception(), TRANSIENT):
            self._post_again(payload)

    def _post_again(self, payload: bytes) -> None:
        async def attempt(link: Link) -> bytes:
            return await answer(link.call(payload))

        if not self.closed:
            posting = _compat.spawn(self.tasks, self.attempts, attempt)
            self._posted.add(posting)
            posting.add_done_callback(self._posted.discard)

    async def _dial(self) -> Link:
        patience = Patience(self.reconnect)
        while True:
            try:
                return await self._dial_once()
            except ApiUnavailable as error:
                # A client that never reached the API has a wrong address or no API: waiting helps nobody.
                if not self._worked:
                    raise
                await patience.wait(error)

    async def _dial_once(self) -> Link:
        socket = await Socket.open(self.address, self._tls)
        if self.closed:
            await socket.close()
            raise ApiUnavailable("the client is closed")
        self._socket, self._worked = socket, True
        return socket.link


async def answer(call: Call) -> bytes:
    """Wait for the answer; being cancelled meanwhile abandons the call."""
    try:
        return await call.answer
    finally:
        call.abandon()
