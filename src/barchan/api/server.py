"""One API process from open sockets to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from barchan.api.app import make_app
from barchan.api.auth import Auth
from barchan.api.listen import BACKLOG, Opened
from barchan.api.reply import JsonHandler
from barchan.config import ApiConfig
from barchan.control.dispatch import Dispatch
from barchan.control.nodes import KEEP_FILE, Nodes

KEEPALIVE = 75.0
SHUTDOWN = 2.0
"""Seconds that requests under way get at the end."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The API answers from now on."""

    ready: str = "api"
    pid: int
    socket: str
    url: str = ""
    """Of the TCP address, if any, with the port that was bound."""


@contextlib.asynccontextmanager
async def serving(config: ApiConfig, opened: Opened) -> AsyncIterator[Ready]:
    """Serve on the opened sockets until the block ends."""
    nodes = Nodes(config.node_wait)
    app = make_app(Dispatch(nodes), Auth(opened.token), config.batch_wait)
    runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(nodes.listening(opened.node))
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await stack.enter_async_context(_accepting(runner, opened.api, None))
        if opened.tcp is not None:
            await stack.enter_async_context(_accepting(runner, opened.tcp, opened.tls))
        yield Ready(pid=os.getpid(), socket=str(config.layout.api_socket), url=opened.url)


@contextlib.asynccontextmanager
async def _accepting(runner: web.AppRunner, sock: socket.socket, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
    loop, manager = asyncio.get_running_loop(), runner.server
    assert manager is not None

    def protocol() -> JsonHandler:
        return JsonHandler(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # its own default runner passes None, too
            keepalive_timeout=KEEPALIVE,
        )

    if sock.family == socket.AF_UNIX:
        server = await loop.create_unix_server(protocol, sock=sock, backlog=BACKLOG, **KEEP_FILE)
    else:
        server = await loop.create_server(protocol, sock=sock, ssl=tls, backlog=BACKLOG)
    try:
        yield
    finally:
        server.close()
