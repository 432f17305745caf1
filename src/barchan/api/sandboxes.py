"""/v1/sandboxes"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from barchan.api.many import over_http
from barchan.api.queries import CountQuery, FindQuery, query_of
from barchan.api.reply import body_of, json_reply, key_of
from barchan.api.state import DISPATCH
from barchan.api.values import Renewal
from barchan.errors import InvalidRequest
from barchan.packing import PackOrder
from barchan.spec import SandboxSpec
from barchan.wire.ids import new_id
from barchan.wire.messages import (
    CreateSandbox,
    GetSandbox,
    GetStats,
    ListSandboxes,
    PackDiff,
    RenewSandbox,
    Request,
    StopSandbox,
    unpack,
)


async def _relay(request: web.Request, message: Request, status: int = 200) -> web.Response:
    answer: Any = unpack(await request.app[DISPATCH].answer(message), message.answer)
    return json_reply(answer, status)


async def create(request: web.Request) -> web.StreamResponse:
    count = query_of(request, CountQuery).count
    spec, key = await body_of(request, SandboxSpec), key_of(request)
    if count is not None:
        return await over_http(request, spec, count, key)
    return await _relay(request, CreateSandbox(spec=spec, key=new_id() if key is None else key), 201)


async def find(request: web.Request) -> web.StreamResponse:
    query = query_of(request, FindQuery)
    message = ListSandboxes(
        labels=dict(_label(text) for text in query.label),
        states=query.state,
        ended=query.ended == "true",
        environment=query.environment,
        backend=query.backend,
        node=query.node,
        prefix=query.prefix,
        created_after=query.created_after,
        created_before=query.created_before,
        after=query.after,
        limit=query.limit,
    )
    return await _relay(request, message)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidRequest(f"label: {text[:80]!r} is not key=value", field="label")
    return key, value


async def stats(request: web.Request) -> web.StreamResponse:
    return await _relay(request, GetStats(sandbox=request.match_info["sandbox"]))


async def pack(request: web.Request) -> web.StreamResponse:
    order, key = await body_of(request, PackOrder), key_of(request)
    message = PackDiff(sandbox=request.match_info["sandbox"], order=order, key=new_id() if key is None else key)
    return await _relay(request, message, 201)


async def get(request: web.Request) -> web.StreamResponse:
    return await _relay(request, GetSandbox(sandbox=request.match_info["sandbox"]))


async def stop(request: web.Request) -> web.StreamResponse:
    return await _relay(request, StopSandbox(sandbox=request.match_info["sandbox"]))


async def renew(request: web.Request) -> web.StreamResponse:
    body = await body_of(request, Renewal)
    message = RenewSandbox(
        sandbox=request.match_info["sandbox"], idle_timeout=body.idle_timeout, lifetime=body.lifetime
    )
    return await _relay(request, message)
