"""/v1/environments, /v1/nodes, /v1/health, /v1/openapi.json"""

from __future__ import annotations

from aiohttp import web

from barchan._version import __version__
from barchan.api.reply import body_of, json_reply
from barchan.api.state import DISPATCH, SCHEMA
from barchan.api.values import Health, PullBody
from barchan.spec import EnvironmentRef
from barchan.wire.messages import ListEnvironments, ListNodes, LockEnvironment, PullImage, unpack


async def environments(request: web.Request) -> web.StreamResponse:
    answer = await request.app[DISPATCH].answer(ListEnvironments())
    return json_reply(unpack(answer, ListEnvironments.answer))


async def pull(request: web.Request) -> web.StreamResponse:
    body = await body_of(request, PullBody)
    message = PullImage(image=body.image, again=body.again, node=body.node)
    return json_reply(unpack(await request.app[DISPATCH].answer(message), PullImage.answer))


async def lock(request: web.Request) -> web.StreamResponse:
    message = LockEnvironment(environment=await body_of(request, EnvironmentRef))
    return json_reply(unpack(await request.app[DISPATCH].answer(message), LockEnvironment.answer))


async def nodes(request: web.Request) -> web.StreamResponse:
    answer = await request.app[DISPATCH].answer(ListNodes())
    return json_reply(unpack(answer, ListNodes.answer))


async def health(request: web.Request) -> web.StreamResponse:
    return json_reply(Health(status="ok", version=__version__))


async def schema(request: web.Request) -> web.StreamResponse:
    return web.Response(body=request.app[SCHEMA], content_type="application/json")
