"""/v1/sandboxes/{sandbox}/files: bodies are the files' bytes, of any length; nothing is held in memory as a whole."""

from __future__ import annotations

import os

from aiohttp import web

from barchan.api.reply import json_reply, number, query_of
from barchan.api.state import DISPATCH
from barchan.api.values import Done, FileEntry
from barchan.errors import BarchanError, InvalidRequest
from barchan.wire.frames import STDOUT
from barchan.wire.guest import Cursor, read_entry
from barchan.wire.link import Call
from barchan.wire.messages import ListFiles, ReadFile, WriteFile
from barchan.wire.streams import MAX_LISTING, CallStreams, Taking


def _path(query: dict[str, str]) -> bytes:
    if "path" not in query:
        raise InvalidRequest("path: missing", field="path")
    return os.fsencode(query["path"])


async def read(request: web.Request) -> web.StreamResponse:
    query = query_of(request, frozenset({"path", "user"}))
    message = ReadFile(sandbox=request.match_info["sandbox"], path=_path(query), user=query.get("user"))
    streams = CallStreams()
    call = await request.app[DISPATCH].open(message, on_frame=streams.on_frame)
    streams.attach(call)
    call.answer.add_done_callback(lambda answer: _end(streams, call))
    try:
        return await _stream(request, streams)
    finally:
        call.abandon()


def _end(streams: CallStreams, call: Call) -> None:
    error = None if call.answer.cancelled() else call.answer.exception()
    if isinstance(error, BarchanError):
        streams.fail(error)


async def _stream(request: web.Request, streams: CallStreams) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    # Before the first byte, a failure is still an answer with its own status; after it, only a cut connection says so.
    chunk = await streams.stdout.read()
    await reply.prepare(request)
    try:
        while chunk:
            await reply.write(chunk)
            chunk = await streams.stdout.read()
    except BarchanError:
        if request.transport is not None:
            request.transport.abort()
        return reply
    await reply.write_eof()
    return reply


async def write(request: web.Request) -> web.StreamResponse:
    query = query_of(request, frozenset({"path", "user", "mode"}))
    mode = number(query["mode"], "mode", 8) if "mode" in query else None
    message = WriteFile(sandbox=request.match_info["sandbox"], path=_path(query), user=query.get("user"), mode=mode)
    streams = CallStreams(outputs=())
    call = await request.app[DISPATCH].open(message, on_frame=streams.on_frame)
    streams.attach(call)
    streams.stdin.resume(0)
    call.answer.add_done_callback(lambda answer: _end(streams, call))
    try:
        async for chunk in request.content.iter_chunked(1 << 17):
            await streams.stdin.write(chunk)
        streams.stdin.eof()
        await call.answer
    finally:
        call.abandon()
    return json_reply(Done())


async def entries(request: web.Request) -> web.StreamResponse:
    query = query_of(request, frozenset({"path", "user", "depth"}))
    message = ListFiles(
        sandbox=request.match_info["sandbox"],
        path=_path(query),
        user=query.get("user"),
        depth=number(query.get("depth", "1"), "depth"),
    )
    streams = CallStreams(outputs=(STDOUT,), taking=Taking.COLLECT, most=MAX_LISTING)
    call = await request.app[DISPATCH].open(message, on_frame=streams.on_frame)
    streams.attach(call)
    try:
        await call.answer
    finally:
        call.abandon()
    cursor = Cursor(streams.stdout.collected())
    found = []
    while cursor.left:
        found.append(FileEntry.of(read_entry(cursor)))
    return json_reply(found)
