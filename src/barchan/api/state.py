"""What handlers reach through the application."""

from __future__ import annotations

from aiohttp import web

from barchan.api.auth import Auth
from barchan.control.dispatch import Dispatch

DISPATCH = web.AppKey("dispatch", Dispatch)
AUTH = web.AppKey("auth", Auth)
SCHEMA = web.AppKey("schema", bytes)
CLIENTS: web.AppKey[set[web.WebSocketResponse]] = web.AppKey("clients", set)
