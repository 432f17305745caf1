"""/v1/connect: one WebSocket per client, whose binary messages are a byte stream of frames.

Each call of the client is decoded once, to check it and to find its node; after that its frames pass in both directions with
nothing changed but their id. Credit bounds what is under way; a client that gives credit but does not read is dropped.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import WSCloseCode, WSMsgType, web

from barchan.api.many import over_link
from barchan.api.state import BATCHES, CLIENTS, DISPATCH
from barchan.control.dispatch import Dispatch
from barchan.control.many import Batches
from barchan.errors import BarchanError, InvalidRequest, ProtocolError
from barchan.wire.frames import Frame, FrameType
from barchan.wire.link import Answered, Incoming, Link
from barchan.wire.messages import CancelMany, CreateMany, CreateSandbox, OfSandbox, unpack_call
from barchan.wire.transports import MAX_MESSAGE, Outbox

logger = logging.getLogger(__name__)
HEARTBEAT = 30.0
_UP = (FrameType.DATA, FrameType.EOF, FrameType.CREDIT)


async def connect(request: web.Request) -> web.StreamResponse:
    """Browsers send an Origin and are refused: a page must not reach an API on its reader's own machine."""
    if "Origin" in request.headers:
        raise InvalidRequest("connections from web pages are refused", field="Origin")
    socket = web.WebSocketResponse(compress=False, max_msg_size=MAX_MESSAGE, heartbeat=HEARTBEAT, autoping=True)
    await socket.prepare(request)
    clients = request.app[CLIENTS].open
    clients.add(socket)
    try:
        await _serve(request, socket)
    finally:
        clients.discard(socket)
    return socket


async def _serve(request: web.Request, socket: web.WebSocketResponse) -> None:
    outbox = Outbox(socket.send_bytes)
    link = Link(outbox.write, _Relay(request.app[DISPATCH], request.app[BATCHES]).serve, dialled=False)
    sender = asyncio.create_task(outbox.run())
    sender.add_done_callback(lambda task: _sender_ended(task, request))
    try:
        await _receive(socket, link)
    except ProtocolError as error:
        await socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=str(error).encode()[:120])
    finally:
        link.close()
        outbox.close()
        sender.cancel()


async def _receive(socket: web.WebSocketResponse, link: Link) -> None:
    async for message in socket:
        if message.type != WSMsgType.BINARY:
            raise ProtocolError("only binary messages are understood")
        link.feed(message.data)


def _sender_ended(task: asyncio.Task[None], request: web.Request) -> None:
    error = None if task.cancelled() else task.exception()
    if error is None:
        return
    if not isinstance(error, ConnectionError):
        logger.warning("client dropped: %s", error)
    if request.transport is not None:
        request.transport.abort()


class _Relay:
    def __init__(self, dispatch: Dispatch, batches: Batches) -> None:
        self._dispatch = dispatch
        self._batches = batches
        self._making: set[asyncio.Task[bytes]] = set()

    async def serve(self, incoming: Incoming) -> bytes:
        request = unpack_call(incoming.payload)
        if isinstance(request, CreateSandbox):
            return await self._create(incoming, request)
        if isinstance(request, (CreateMany, CancelMany)):
            return await over_link(self._batches, request, incoming)
        if not isinstance(request, OfSandbox):
            return await self._dispatch.answer(request)

        def down(frame: Frame) -> None:
            incoming.send_frame(frame.type, frame.payload, frame.stream)

        def up(frame: Frame) -> None:
            if frame.type in _UP:
                call.send_frame(frame.type, frame.payload, frame.stream)

        call = await self._dispatch.open(request, incoming.payload, down)
        incoming.on_frame = up
        try:
            return await call.answer
        except BarchanError:
            if call.refusal:
                raise Answered(call.refusal) from None
            raise
        finally:
            call.abandon()

    async def _create(self, incoming: Incoming, request: CreateSandbox) -> bytes:
        """A client that lost its connection asks again with the same key; until then the work goes on.

        One that gave up says so, and what was made is undone.
        """
        making = asyncio.get_running_loop().create_task(self._dispatch.answer(request))
        self._making.add(making)
        making.add_done_callback(self._made)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            if not incoming.link_lost:
                making.cancel()
            raise

    def _made(self, making: asyncio.Task[bytes]) -> None:
        self._making.discard(making)
        if not making.cancelled():
            making.exception()  # its caller may be gone
