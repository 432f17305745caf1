"""The application: routes, who may use them, and the rule that every error leaves as JSON."""

from __future__ import annotations

from typing import cast

import msgspec
from aiohttp import web

from barchan.api.auth import Auth
from barchan.api.openapi import document
from barchan.api.queries import NoQuery, query_of
from barchan.api.reply import MAX_BODY, JsonHandler, error_reply, internal, router_error
from barchan.api.routes import ROUTES, Handler, Route
from barchan.api.state import AUTH, BATCHES, CLIENTS, DISPATCH, SCHEMA, Clients
from barchan.control.dispatch import Dispatch
from barchan.control.many import Batches
from barchan.errors import BarchanError, InvalidRequest
from barchan.wire.websocket import CloseCode

_OPEN = frozenset(route.path for route in ROUTES if route.open)


def make_app(dispatch: Dispatch, auth: Auth, batch_wait: float = 90.0) -> web.Application:
    app = web.Application(middlewares=[_guard], client_max_size=MAX_BODY)
    app[DISPATCH] = dispatch
    app[BATCHES] = Batches(dispatch, batch_wait)
    app[AUTH] = auth
    app[SCHEMA] = msgspec.json.encode(document(ROUTES))
    app[CLIENTS] = Clients()
    app.on_shutdown.append(_hang_up)
    for route in ROUTES:
        app.router.add_route(
            route.method, route.path, route.handler if route.query is not NoQuery else _without_query(route)
        )
    return app


def _without_query(route: Route) -> Handler:
    async def serve(request: web.Request) -> web.StreamResponse:
        query_of(request, NoQuery)
        return await route.handler(request)

    return serve


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if request.path not in _OPEN:
            request.app[AUTH].check(request)
            cast(JsonHandler, request.protocol).recognised()
        return await handler(request)
    except BarchanError as error:
        return error_reply(error)
    except web.HTTPException as error:
        return router_error(error)
    except web.RequestPayloadError:
        reply = error_reply(InvalidRequest("the body is not encoded as its headers say", field="body"))
        reply.force_close()
        return reply
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets a typed answer
        return error_reply(internal(error))


async def _hang_up(app: web.Application) -> None:
    for client in tuple(app[CLIENTS].open):
        client.close(CloseCode.GOING_AWAY, "the API is stopping")
