"""What handlers reach through the application."""

from __future__ import annotations

from aiohttp import web

from barchan.api.auth import Auth
from barchan.control.dispatch import Dispatch
from barchan.control.many import Batches
from barchan.wire.transports import WebSocketLink


class Clients:
    """The WebSockets that are open now."""

    def __init__(self) -> None:
        self.open: set[WebSocketLink] = set()


DISPATCH = web.AppKey("dispatch", Dispatch)
BATCHES = web.AppKey("batches", Batches)
AUTH = web.AppKey("auth", Auth)
SCHEMA = web.AppKey("schema", bytes)
CLIENTS = web.AppKey("clients", Clients)
