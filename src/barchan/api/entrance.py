"""TCP connections, which anybody may make: those that have not shown the token are few, and make room for one another.

Whoever knows the token shows it with the first request, so of strangers the oldest is the one to close: a flood of them closes
its own, and a client is in danger only for the moment between its connection and its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial

from barchan.api.listen import BACKLOG
from barchan.api.reply import JsonHandler
from barchan.config import ApiConfig

logger = logging.getLogger(__name__)
PAUSE = 0.1
"""Seconds without accepting, when the host has no descriptor left."""
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
Handler = Callable[[Callable[[], None]], JsonHandler]
"""Takes what to call when its client shows the token."""


class Visitor:
    """One connection, from its first moment."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.handler: JsonHandler | None = None

    def hang_up(self) -> None:
        transport = None if self.handler is None else self.handler.transport
        if transport is not None:
            transport.abort()
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the handshake, whose transport owns the descriptor


class Visitors:
    """Who is connected. Pure but for hanging up."""

    def __init__(self, strangers: int, most: int) -> None:
        self._most = max(most, 1)
        self._most_strangers = max(min(strangers, most // 2), 1)
        self._strangers: dict[Visitor, None] = {}
        self._all: set[Visitor] = set()

    def enter(self, visitor: Visitor) -> bool:
        """Whether there is room for a new one, which the oldest stranger may have to make."""
        if len(self._strangers) >= self._most_strangers or len(self._all) >= self._most:
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.hang_up()
        self._strangers[visitor] = None
        self._all.add(visitor)
        return True

    def recognise(self, visitor: Visitor) -> None:
        self._strangers.pop(visitor, None)

    def leave(self, visitor: Visitor) -> None:
        """Safe twice."""
        self._strangers.pop(visitor, None)
        self._all.discard(visitor)


class Entrance:
    """Accepts on one TCP socket. Use `open` as a context manager."""

    def __init__(self, config: ApiConfig, tls: ssl.SSLContext | None, handler: Handler) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._visitors = Visitors(config.strangers, limit - config.kept_files)
        self._tls = tls
        self._handshake = config.request_wait if tls else None
        self._handler = handler
        self._serving: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def open(self, listening: socket.socket) -> AsyncIterator[None]:
        """Accept until the block ends; then no connection is left in its handshake."""
        listening.listen(BACKLOG)
        accepting = asyncio.create_task(self._accept(listening))
        try:
            yield
        finally:
            tasks = [accepting, *self._serving]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    logger.warning("no connection can be accepted: %s", error.strerror)
                await asyncio.sleep(PAUSE if error.errno in _NO_ROOM else 0)
                continue
            visitor = Visitor(sock)
            if not self._visitors.enter(visitor):
                sock.close()
                continue
            task = asyncio.create_task(self._serve(sock, visitor))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, sock: socket.socket, visitor: Visitor) -> None:
        try:
            _, handler = await asyncio.get_running_loop().connect_accepted_socket(
                partial(self._handler, partial(self._visitors.recognise, visitor)),
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake,
            )
            visitor.handler = handler
            await asyncio.shield(handler.gone)
        except OSError as error:  # of the handshake
            logger.debug("not served: %s", error)
        finally:
            self._visitors.leave(visitor)
