"""Many sandboxes by one request, answered one by one as they are ready: over the WebSocket and over plain HTTP."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from barchan.api.reply import while_connected
from barchan.api.state import BATCHES
from barchan.control.checks import check_request
from barchan.control.many import Batch, Batches
from barchan.errors import BarchanError
from barchan.spec import SandboxSpec
from barchan.wire.frames import Frame, FrameType
from barchan.wire.ids import new_id
from barchan.wire.link import Incoming
from barchan.wire.messages import CancelMany, CreateMany, Taken, pack, unpack

_encoder = msgspec.json.Encoder()


async def over_link(batches: Batches, request: CreateMany | CancelMany, incoming: Incoming) -> bytes:
    """The caller says what it has taken; the rest goes when it gives up, or stays away for too long."""
    check_request(request)
    if isinstance(request, CancelMany):
        await batches.cancel(request)
        return pack(None)
    batch = batches.open(request)

    def up(frame: Frame) -> None:
        if frame.type == FrameType.EVENT:
            batch.take(unpack(frame.payload, Taken).count)

    incoming.on_frame = up
    try:
        async for created in batch:
            incoming.event(created)
        await batch.all_taken()
    finally:
        batches.leave(batch, lost=incoming.link_lost)
    return pack(None)


async def over_http(request: web.Request, spec: SandboxSpec, count: int, key: str | None) -> web.StreamResponse:
    """All are the client's once the last line is sent. One that hangs up before has none, unless it comes back with its key."""
    message = CreateMany(spec=spec, key=new_id() if key is None else key, count=count)
    check_request(message)
    batches = request.app[BATCHES]
    batch = batches.open(message)
    reply = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    writing = asyncio.create_task(_write(request, reply, batch))
    try:
        await while_connected(request, writing)
        batch.take(count)
    finally:
        writing.cancel()
        batches.leave(batch, lost=key is not None)
    return reply


async def _write(request: web.Request, reply: web.StreamResponse, batch: Batch) -> None:
    await reply.prepare(request)
    try:
        async for created in batch:
            await reply.write(_encoder.encode(created) + b"\n")
            batch.release()
    except BarchanError as error:  # the answer was begun: only its missing end can tell
        raise ConnectionResetError(str(error)) from error
    await reply.write_eof()
