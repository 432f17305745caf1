"""/v1/sandboxes/{sandbox}/files: bodies are the files' bytes, of any length; nothing is held in memory as a whole."""

from __future__ import annotations

from aiohttp import HttpVersion11, web

from barchan.api.queries import FileQuery, ListQuery, WriteQuery, number, path_of, query_of
from barchan.api.reply import internal, json_reply
from barchan.api.state import DISPATCH
from barchan.api.values import Done, FileEntry
from barchan.errors import BarchanError, InvalidRequest, ProtocolError
from barchan.spec import MIB
from barchan.wire.frames import STDOUT
from barchan.wire.guest import Cursor, read_entry
from barchan.wire.messages import ListFiles, ReadFile, WriteFile
from barchan.wire.streams import ByteReceiver, CallStreams, Taking

MOST_LISTED = 2 * MIB
"""Of entries in one answer, before they are JSON: making it holds up everybody else. Larger directories are for the SDK."""


async def read(request: web.Request) -> web.StreamResponse:
    """Before the first byte a failure is an answer with its own status; after it, the body ends without its end mark."""
    if request.version < HttpVersion11:
        raise InvalidRequest("reading a file needs HTTP/1.1", hint="HTTP/1.0 cannot tell a cut body from a whole one")
    query = query_of(request, FileQuery)
    message = ReadFile(sandbox=request.match_info["sandbox"], path=path_of(query), user=query.user)
    streams = CallStreams(confirmed=True)
    call = await request.app[DISPATCH].open(message, on_frame=streams.on_frame)
    streams.follow(call)
    try:
        return await _stream(request, streams.stdout)
    finally:
        call.abandon()


async def _stream(request: web.Request, output: ByteReceiver) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    chunk = await output.read()
    await reply.prepare(request)
    try:
        while chunk:
            await reply.write(chunk)
            chunk = await output.read()
        await reply.write_eof()
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - the status is sent: whatever it is, only a cut connection tells
        if not isinstance(error, BarchanError):
            internal(error)
        if request.transport is not None:
            request.transport.abort()
    return reply


async def write(request: web.Request) -> web.StreamResponse:
    query = query_of(request, WriteQuery)
    message = WriteFile(
        sandbox=request.match_info["sandbox"],
        path=path_of(query),
        user=query.user,
        mode=None if query.mode is None else number(query.mode, "mode", 8),
    )
    streams = CallStreams(outputs=())
    call = await request.app[DISPATCH].open(message, on_frame=streams.on_frame)
    streams.follow(call)
    streams.stdin.resume(0)
    try:
        async for chunk in request.content.iter_chunked(1 << 17):
            await streams.stdin.write(chunk)
        streams.stdin.eof()
        await call.answer
        if streams.stdin.cut:
            raise ProtocolError("the node answered before it had the whole file")
    finally:
        call.abandon()
    return json_reply(Done())


async def entries(request: web.Request) -> web.StreamResponse:
    query = query_of(request, ListQuery)
    message = ListFiles(sandbox=request.match_info["sandbox"], path=path_of(query), user=query.user, depth=query.depth)
    streams = CallStreams(outputs=(STDOUT,), taking=Taking.COLLECT, most=MOST_LISTED, confirmed=True)
    call = await request.app[DISPATCH].open(message, on_frame=streams.on_frame)
    streams.follow(call)
    try:
        await call.answer
    except ProtocolError as error:
        if streams.stdout.offset <= MOST_LISTED:
            raise
        raise _too_large(query) from error
    finally:
        call.abandon()
    cursor = Cursor(streams.stdout.collected())
    found = []
    while cursor.left:
        found.append(FileEntry.of(read_entry(cursor)))
    return json_reply(found)


def _too_large(query: ListQuery) -> InvalidRequest:
    hint = "list it with the SDK" if query.depth == 1 else "ask for less depth, or list it with the SDK"
    return InvalidRequest(f"the entries have more than {MOST_LISTED} bytes", field="path", hint=hint)
