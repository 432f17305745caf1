"""JSON in and out. Every answer that is not a stream of bytes leaves through here."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import web

from barchan.errors import BarchanError, InternalError, InvalidRequest, Unauthenticated
from barchan.wire.fields import field_of

T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_BODY = 8 << 20
"""Bytes of a JSON body."""
_encoder = msgspec.json.Encoder()


def json_reply(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(value), status=status, content_type="application/json")


def error_reply(error: BarchanError, status: int = 0) -> web.Response:
    """`status` is the router's own for requests that never reached an operation."""
    reply = json_reply(error.body(), status or error.status)
    if reply.status == Unauthenticated.status:
        reply.headers["WWW-Authenticate"] = "Bearer"
    return reply


def internal(error: Exception) -> InternalError:
    """For an exception that nobody expected. Its text may hold anything, so only its kind leaves."""
    logger.error("request failed", exc_info=error)
    return InternalError(f"unexpected {type(error).__name__}", hint="the API's log has the details")


async def body_of(request: web.Request, type_: type[T]) -> T:
    """The JSON body, strictly as `type_`. Raises `InvalidRequest` naming the field."""
    if request.content_type not in ("application/json", "application/octet-stream"):
        raise InvalidRequest(f"the body is {request.content_type}", field="Content-Type", hint="send application/json")
    data = await request.read() or b"{}"
    try:
        body = msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), field=field_of(error)) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"not JSON: {error}", field="body") from error
    json.loads(data, object_pairs_hook=_once)
    return body


def key_of(request: web.Request) -> str | None:
    """The idempotency key. An empty one is one, and refused with the request: its sender counts on it."""
    given = request.headers.getall("Idempotency-Key", [])
    if len(given) > 1:
        raise InvalidRequest("Idempotency-Key is given twice", field="key")
    return given[0] if given else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a name that is given twice, readers differ in which one they take."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidRequest(f"{name[:80]!r} is given twice", field=name[:80])
        found[name] = value
    return found


def router_error(error: web.HTTPException) -> web.Response:
    """What the HTTP library itself refused: no such path or method, a body too large, no upgrade."""
    named = {
        400: "not a WebSocket handshake",
        404: "no such path",
        405: "no such method here",
        413: f"the body exceeds {MAX_BODY} bytes",
        417: "the only expectation known is 100-continue",
    }
    reply = error_reply(InvalidRequest(named.get(error.status, error.reason)), error.status)
    if "Allow" in error.headers:
        reply.headers["Allow"] = error.headers["Allow"]
    return reply


class JsonHandler(web.RequestHandler):
    """Answers in JSON also where a request was too broken to reach the application, tells when its client is gone, and hangs
    up on one that takes more than `request_wait` seconds for its first request, or for a later one that it has begun.

    `recognised` is called for every request of somebody who may ask.
    """

    def __init__(self, *args: Any, request_wait: float, recognised: Callable[[], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._request_wait = request_wait
        self.recognised = recognised
        self._due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        known = self._request_count
        super().data_received(data)
        if self._request_count != known:
            self._expect_nothing()
        elif self._due is None and self._waiter is not None and not self._waiter.done():
            self._expect()  # nothing is being answered, so this is the beginning of a request

    def connection_lost(self, exc: BaseException | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)
        if not self.gone.done():
            self.gone.set_result(None)

    def _expect(self) -> None:
        self._due = asyncio.get_running_loop().call_later(self._request_wait, self.force_close)

    def _expect_nothing(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Also for what the library refuses before the application has the request."""
        answer = router_error(resp) if isinstance(resp, web.HTTPException) else resp
        return await super().finish_response(request, answer, start_time)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            error: BarchanError = internal(exc if isinstance(exc, Exception) else RuntimeError(str(exc)))
        else:
            error = InvalidRequest("not an HTTP request that can be understood")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer was already begun")
        reply = error_reply(error, status)
        reply.force_close()
        return reply


async def while_connected(request: web.Request, task: asyncio.Task[T]) -> T:
    """The task's result. Raises `ConnectionResetError` when the client hangs up first; the task runs on."""
    gone = cast(JsonHandler, request.protocol).gone
    await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        raise ConnectionResetError("the client hung up")
    return await task
