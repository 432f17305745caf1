"""/v1/sandboxes/{sandbox}/exec"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from barchan.api.queries import HistoryQuery, query_of
from barchan.api.reply import body_of, json_reply, while_connected
from barchan.api.state import DISPATCH
from barchan.api.values import Done, ExecAnswer, ExecBody, ExecRecord, SignalBody
from barchan.control.dispatch import Dispatch
from barchan.errors import BarchanError
from barchan.spec import ExecInfo, ExecResult
from barchan.wire.frames import STDERR, STDOUT
from barchan.wire.ids import new_exec_id
from barchan.wire.messages import CancelExec, ExecStarted, ListExecs, SignalExec, StartExec, unpack
from barchan.wire.streams import ByteSender, CallStreams, Taking


async def run(request: web.Request) -> web.StreamResponse:
    """A client that hangs up ends its command."""
    body = await body_of(request, ExecBody)
    message = StartExec(
        sandbox=request.match_info["sandbox"], id=body.id if body.id is not None else new_exec_id(), exec=body.exec()
    )
    dispatch, known = request.app[DISPATCH], asyncio.Event()
    running = asyncio.create_task(_collected(dispatch, message, body.input(), known))
    running.add_done_callback(lambda _: known.set())
    try:
        return json_reply(await while_connected(request, running))
    except ConnectionResetError:
        await known.wait()
        with contextlib.suppress(BarchanError):
            await dispatch.answer(CancelExec(sandbox=message.sandbox, id=message.id))
        raise
    finally:
        running.cancel()


async def _collected(dispatch: Dispatch, message: StartExec, stdin: bytes | None, known: asyncio.Event) -> ExecAnswer:
    """Sets `known` once the node has the command, so that it can be cancelled."""
    streams = CallStreams(outputs=(STDOUT, STDERR), taking=Taking.COLLECT)

    def started(raw: bytes) -> None:
        known.set()
        streams.stdin.resume(unpack(raw, ExecStarted).stdin_offset)

    streams.on_event = started
    call = await dispatch.open(message, on_frame=streams.on_frame)
    streams.attach(call)
    writer = asyncio.create_task(_write(streams.stdin, stdin)) if stdin is not None else None
    try:
        result = unpack(await call.answer, ExecResult)
        streams.finish(result.outputs)
    finally:
        call.abandon()
        if writer is not None:
            writer.cancel()
    return ExecAnswer.of(result, streams.stdout.collected(), streams.stderr.collected())


async def _write(sender: ByteSender, data: bytes) -> None:
    await sender.write(data)
    sender.eof()


async def history(request: web.Request) -> web.StreamResponse:
    page = query_of(request, HistoryQuery)
    sandbox, partial = request.match_info["sandbox"], page.partial == "true"
    message = ListExecs(sandbox=sandbox, after=page.after, limit=page.limit, partial=partial)
    found = unpack(await request.app[DISPATCH].answer(message), tuple[ExecInfo, ...])
    return json_reply([ExecRecord.of(info) for info in found])


async def signal(request: web.Request) -> web.StreamResponse:
    body = await body_of(request, SignalBody)
    message = SignalExec(
        sandbox=request.match_info["sandbox"],
        id=request.match_info["exec"],
        signal=body.signal,
        everyone=body.everyone,
    )
    await request.app[DISPATCH].answer(message)
    return json_reply(Done())


async def cancel(request: web.Request) -> web.StreamResponse:
    message = CancelExec(sandbox=request.match_info["sandbox"], id=request.match_info["exec"])
    await request.app[DISPATCH].answer(message)
    return json_reply(Done())
