"""/v1/sandboxes"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from barchan.api.reply import body_of, json_reply, page_of, query_of
from barchan.api.state import DISPATCH
from barchan.api.values import Renewal
from barchan.errors import InvalidRequest
from barchan.spec import SandboxSpec
from barchan.wire.ids import new_id
from barchan.wire.messages import (
    CreateSandbox,
    GetSandbox,
    ListSandboxes,
    RenewSandbox,
    Request,
    StopSandbox,
    unpack,
)


async def _relay(request: web.Request, message: Request, status: int = 200) -> web.Response:
    answer: Any = unpack(await request.app[DISPATCH].answer(message), message.answer)
    return json_reply(answer, status)


async def create(request: web.Request) -> web.StreamResponse:
    spec = await body_of(request, SandboxSpec)
    key = request.headers.get("Idempotency-Key") or new_id()
    return await _relay(request, CreateSandbox(spec=spec, key=key), 201)


async def find(request: web.Request) -> web.StreamResponse:
    after, limit = page_of(query_of(request, frozenset({"label", "after", "limit"})))
    labels = {}
    for text in request.query.getall("label", []):
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"label: {text[:80]!r} is not key=value", field="label")
        labels[key] = value
    return await _relay(request, ListSandboxes(labels=labels, after=after, limit=limit))


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
