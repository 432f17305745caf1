"""/v1/connect: one WebSocket per client, whose binary messages are a byte stream of frames.

Each call of the client is decoded once, to check it and to find its node; after that its frames pass in both directions with
nothing changed but their id. Credit bounds what is under way; a client that gives credit but does not read is dropped.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from barchan.api.many import over_link
from barchan.api.state import BATCHES, CLIENTS, DISPATCH
from barchan.control.checks import check_request
from barchan.control.dispatch import Dispatch
from barchan.control.many import Batches
from barchan.errors import ApiUnavailable, BarchanError, InvalidRequest
from barchan.wire.frames import Frame, FrameType
from barchan.wire.link import Answered, FrameSink, Incoming
from barchan.wire.messages import CancelMany, CreateMany, CreateSandbox, OfSandbox, PullImage, unpack_call
from barchan.wire.transports import WebSocketLink
from barchan.wire.websocket import accept_key, is_key

_UP = (FrameType.DATA, FrameType.EOF, FrameType.CREDIT)


async def connect(request: web.Request) -> web.StreamResponse:
    """Browsers send an Origin and are refused: a page must not reach an API on its reader's own machine."""
    if "Origin" in request.headers:
        raise InvalidRequest("connections from web pages are refused", field="Origin")
    response = _upgrade(request)
    await response.prepare(request)
    if request.transport is None:
        return response
    relay = _Relay(request.app[DISPATCH], request.app[BATCHES])
    socket = WebSocketLink(request.transport, relay.serve, dialled=False, lost=_client_lost)
    clients = request.app[CLIENTS].open
    clients.add(socket)
    try:
        request.protocol.set_parser(socket)  # type: ignore[arg-type]  # it is used as one
        await socket.closed.wait()
    finally:
        clients.discard(socket)
    return response


def _upgrade(request: web.Request) -> web.StreamResponse:
    """The server's half of the handshake."""
    given = request.headers
    key = given.get("Sec-WebSocket-Key", "")
    if given.get("Upgrade", "").lower() != "websocket" or "upgrade" not in given.get("Connection", "").lower():
        raise InvalidRequest("this is a WebSocket", field="Upgrade", hint="connect with a WebSocket client")
    if given.get("Sec-WebSocket-Version") != "13":
        raise InvalidRequest("only version 13 of WebSocket is spoken", field="Sec-WebSocket-Version")
    if not is_key(key):
        raise InvalidRequest("not 16 bytes in base64", field="Sec-WebSocket-Key")
    headers = {"Upgrade": "websocket", "Connection": "upgrade", "Sec-WebSocket-Accept": accept_key(key)}
    response = web.StreamResponse(status=101, headers=headers)
    response.force_close()
    return response


def _client_lost() -> BarchanError:
    return ApiUnavailable("connection lost")


def _passed_on(incoming: Incoming) -> FrameSink:
    """What a node says, to the caller."""
    return lambda frame: incoming.send_frame(frame.type, frame.payload, frame.stream)


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
        if isinstance(request, PullImage):
            return await self._dispatch.pull(request, _passed_on(incoming))
        if not isinstance(request, OfSandbox):
            return await self._dispatch.answer(request)

        def up(frame: Frame) -> None:
            if frame.type in _UP:
                call.send_frame(frame.type, frame.payload, frame.stream)

        call = await self._dispatch.open(request, incoming.payload, _passed_on(incoming))
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
        check_request(request)
        making = asyncio.get_running_loop().create_task(self._dispatch.create(request, on_frame=_passed_on(incoming)))
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
