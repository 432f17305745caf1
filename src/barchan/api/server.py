"""One API process from open sockets to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec
from aiohttp import web

from barchan.api.app import make_app
from barchan.api.auth import Auth
from barchan.api.entrance import Entrance
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
        handler = partial(_handler, runner, config.request_wait)
        await stack.enter_async_context(_on_unix(opened.api, partial(handler, _known_already)))
        if opened.tcp is not None:
            await stack.enter_async_context(Entrance(config, opened.tls, handler).open(opened.tcp))
        yield Ready(pid=os.getpid(), socket=str(config.layout.api_socket), url=opened.url)


def _handler(runner: web.AppRunner, request_wait: float, recognised: Callable[[], None]) -> JsonHandler:
    assert runner.server is not None
    return JsonHandler(
        runner.server,
        request_wait=request_wait,
        recognised=recognised,
        loop=asyncio.get_running_loop(),
        access_log=None,  # its own default runner passes None, too
        keepalive_timeout=KEEPALIVE,
    )


def _known_already() -> None:
    """Only root and our own user can open the unix socket."""


@contextlib.asynccontextmanager
async def _on_unix(sock: socket.socket, protocol: Callable[[], JsonHandler]) -> AsyncIterator[None]:
    server = await asyncio.get_running_loop().create_unix_server(protocol, sock=sock, backlog=BACKLOG, **KEEP_FILE)
    try:
        yield
    finally:
        server.close()
