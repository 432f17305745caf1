"""/v1/sandboxes"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from barchan.api.many import over_http
from barchan.api.reply import body_of, json_reply, number, page_of, query_of, real, value_of
from barchan.api.state import DISPATCH
from barchan.api.values import Renewal
from barchan.errors import InvalidRequest
from barchan.spec import SandboxSpec
from barchan.wire.ids import new_id
from barchan.wire.messages import (
    CreateSandbox,
    GetSandbox,
    GetStats,
    ListSandboxes,
    RenewSandbox,
    Request,
    StopSandbox,
    unpack,
)

_TEXTS, _TIMES = ("environment", "backend", "node", "prefix"), ("created_after", "created_before")
FILTERS = frozenset({*_TEXTS, *_TIMES, "label", "state", "ended", "after", "limit"})


async def _relay(request: web.Request, message: Request, status: int = 200) -> web.Response:
    answer: Any = unpack(await request.app[DISPATCH].answer(message), message.answer)
    return json_reply(answer, status)


async def create(request: web.Request) -> web.StreamResponse:
    query = query_of(request, frozenset({"count"}))
    spec = await body_of(request, SandboxSpec)
    if "count" in query:
        return await over_http(request, spec, number(query["count"], "count"))
    key = request.headers.get("Idempotency-Key") or new_id()
    return await _relay(request, CreateSandbox(spec=spec, key=key), 201)


async def find(request: web.Request) -> web.StreamResponse:
    query = query_of(request, FILTERS)
    after, limit = page_of(query)
    labels = {}
    for text in request.query.getall("label", []):
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"label: {text[:80]!r} is not key=value", field="label")
        labels[key] = value
    fields: dict[str, Any] = {name: query[name] for name in _TEXTS if name in query}
    fields |= {name: real(query[name], name) for name in _TIMES if name in query}
    message = value_of(
        ListSandboxes,
        **fields,
        labels=labels,
        states=request.query.getall("state", []),
        ended=_flag(query, "ended"),
        after=after,
        limit=limit,
    )
    return await _relay(request, message)


def _flag(query: dict[str, str], name: str) -> bool:
    if query.get(name, "false") not in ("true", "false"):
        raise InvalidRequest(f"{name}: {query[name][:40]!r} is neither true nor false", field=name)
    return query.get(name) == "true"


async def stats(request: web.Request) -> web.StreamResponse:
    return await _relay(request, GetStats(sandbox=request.match_info["sandbox"]))


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
