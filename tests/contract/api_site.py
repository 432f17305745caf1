"""A whole API in the test's own process: real sockets in a temporary directory, and scripted nodes behind it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from barchan.api.listen import Opened
from barchan.api.server import Ready, serving
from barchan.config import ApiConfig, Layout
from barchan.sdk import Client
from tests.contract.fake_node import FakeNode

TOKEN = "test-token-0123456789"


class Site:
    """One data directory with an API that can be stopped and started again."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.layout = Layout(data)
        self.ready: Ready | None = None
        self._stack = contextlib.AsyncExitStack()

    async def start(self, **options: Any) -> Ready:
        options = {"node_wait": 0.2, "listen": ("127.0.0.1", 0), **options}
        config = ApiConfig(layout=self.layout, **options)
        self.layout.token.write_text(TOKEN + "\n")
        opened = self._stack.enter_context(Opened(config))
        self.ready = await self._stack.enter_async_context(serving(config, opened))
        return self.ready

    async def stop(self) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        assert self.ready is not None
        return self.ready.url

    def node(self, name: str = "n1", **options: Any) -> FakeNode:
        return FakeNode(self.layout.node_socket, name, **options)

    def client(self, **options: Any) -> Client:
        return Client(data=self.data, **{"reconnect": 10.0, **options})


@contextlib.asynccontextmanager
async def site(data: Path, **options: Any) -> AsyncIterator[Site]:
    it = Site(data)
    await it.start(**options)
    try:
        yield it
    finally:
        await it.stop()


class Http:
    """Plain HTTP to the API: over TCP with a token unless said otherwise."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self._session = session
        self._base = base

    async def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and decoded JSON. A body that is not bytes is sent as JSON."""
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        data = None if body is None else io.BytesIO(body if isinstance(body, bytes) else msgspec.json.encode(body))
        async with self._session.request(method, self._base + path, data=data, headers=headers, **options) as reply:
            raw = await reply.read()
            assert reply.content_type == "application/json", raw
            return reply.status, msgspec.json.decode(raw)

    def raw(self, method: str, path: str, **options: Any) -> Any:
        return self._session.request(method, self._base + path, **options)


@contextlib.asynccontextmanager
async def http(base: str, *, token: str | None = TOKEN, unix: Path | None = None) -> AsyncIterator[Http]:
    connector = aiohttp.UnixConnector(str(unix)) if unix else aiohttp.TCPConnector()
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        yield Http(session, base)
