"""Whoever reaches the TCP address can connect. Without the token that gets nobody far, and keeps nobody else out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from barchan.config import Layout
from barchan.sdk import Client
from tests.contract.api_site import TOKEN, Site, site
from tests.contract.fake_node import FakeNode
from tests.contract.test_api_process import api, make_certificate

HALF = b"GET /v1/hea"
HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"
SHORT = 0.2
"""Seconds that a request may take here."""
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(url: str, data: bytes = b"") -> AsyncIterator[Pair]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(data)
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def hung_up(reader: asyncio.StreamReader) -> None:
    """Wait for the end of a connection, which may be a rude one."""
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionResetError):
            assert not await reader.read()


async def a_while(at: Site) -> None:
    """Longer than a request may take."""
    async with connected(at.url, HALF) as (reader, _):
        await hung_up(reader)


async def test_half_a_request_is_not_waited_for(tmp_path: Path) -> None:
    async with site(tmp_path, request_wait=SHORT) as at:
        for beginning in (b"", HALF, HEALTH[:-2]):
            async with connected(at.url, beginning) as (reader, _):
                await hung_up(reader)


async def test_neither_is_a_later_one(tmp_path: Path) -> None:
    async with site(tmp_path, request_wait=SHORT) as at, connected(at.url, HEALTH) as (reader, writer):
        assert b"200" in await reader.readuntil(b"}")
        await a_while(at)  # between requests there is time
        writer.write(HEALTH)
        assert b"200" in await reader.readuntil(b"}")
        writer.write(HALF)
        await hung_up(reader)


async def test_a_request_that_is_slow_in_pieces_is_not_waited_for(tmp_path: Path) -> None:
    async with site(tmp_path, request_wait=SHORT) as at, connected(at.url, b"GET /") as (reader, writer):
        drips = asyncio.create_task(_drip(writer))
        await hung_up(reader)
        drips.cancel()


async def _drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"a")
        await asyncio.sleep(SHORT / 10)


async def test_a_long_body_has_all_the_time(tmp_path: Path) -> None:
    head = (
        f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Content-Type: application/json\r\nContent-Length: 39\r\n\r\n"
    ).encode()
    body = b'{"environment": {"base": "debian-12"} }'
    async with site(tmp_path, request_wait=SHORT) as at, at.node(), connected(at.url, head) as (reader, writer):
        writer.write(body[:10])
        await a_while(at)
        writer.write(body[10:])
        assert b"201" in await reader.readline()


async def test_an_open_link_has_all_the_time(tmp_path: Path) -> None:
    async with site(tmp_path, request_wait=SHORT) as at, at.node(), Client(at.url, TOKEN, reconnect=0.0) as client:
        sandbox = await client.create("debian-12")
        process = await sandbox.start("cat", stdin=True)
        await a_while(at)
        process.stdin.close()
        assert (await process.wait()).exit_code == 0


async def test_the_oldest_stranger_makes_room(tmp_path: Path) -> None:
    async with site(tmp_path, strangers=3) as at, contextlib.AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(connected(at.url, HEALTH)) for _ in range(3)]
        for reader, _ in strangers:
            assert b"200" in await reader.readuntil(b"}")
        fourth, _ = await stack.enter_async_context(connected(at.url, HEALTH))
        await hung_up(strangers[0][0])
        for reader, writer in strangers[1:]:
            writer.write(HEALTH)
            assert b"200" in await reader.readuntil(b"}")
        assert b"200" in await fourth.readuntil(b"}")


async def test_who_has_shown_the_token_stays(tmp_path: Path) -> None:
    known = HEALTH.replace(b"health", b"nodes")[:-2] + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()
    async with site(tmp_path, strangers=1) as at, connected(at.url, known) as (reader, writer):
        assert b"200" in await reader.readuntil(b"]")
        for _ in range(3):
            async with connected(at.url, HEALTH) as (stranger, _):
                assert b"200" in await stranger.readuntil(b"}")
        writer.write(known)
        assert b"200" in await reader.readuntil(b"]")


async def test_a_flood_leaves_the_socket_to_its_owner(tmp_path: Path) -> None:
    """The kernel accepts connections for the API until its queue is full: those do not cost it anything."""
    tmp_path.chmod(0o700)
    with api(tmp_path, files=200, kept_files=100, strangers=10_000, listen=("127.0.0.1", 0)) as ready:
        async with FakeNode(Layout(tmp_path).node_socket):
            with contextlib.ExitStack() as flood:
                parts = urlsplit(ready["url"])
                for _ in range(400):
                    sock = flood.enter_context(socket.create_connection((parts.hostname, parts.port)))
                    sock.sendall(HALF)
                async with Client(data=tmp_path, reconnect=0.0) as near, Client(ready["url"], TOKEN) as far:
                    assert await near.list() == await far.list() == ()
                assert len(list(Path(f"/proc/{ready['pid']}/fd").iterdir())) < 150


async def test_a_silent_handshake_counts_and_is_not_waited_for(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    tls = {"tls_cert": tmp_path / "cert", "tls_key": tmp_path / "key"}
    async with site(tmp_path, request_wait=SHORT, **tls) as at, connected(at.url) as (reader, _):
        await hung_up(reader)
    async with site(tmp_path, strangers=1, **tls) as at, connected(at.url) as (reader, _), connected(at.url):
        await hung_up(reader)


@pytest.mark.parametrize("tls", [False, True])
async def test_it_stops_with_connections_of_all_kinds(tmp_path: Path, tls: bool) -> None:
    options = {}
    if tls:
        make_certificate(tmp_path)
        options = {"tls_cert": tmp_path / "cert", "tls_key": tmp_path / "key"}
    async with contextlib.AsyncExitStack() as stack:
        async with site(tmp_path, **options) as at:
            readers = [(await stack.enter_async_context(connected(at.url, data)))[0] for data in (b"", HALF)]
            async with at.client() as near:
                await near.list()
        for reader in readers:
            await hung_up(reader)
