"""The client's half of a WebSocket handshake, against servers that answer as they like."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from barchan.errors import ApiUnavailable, BarchanError, ProtocolError, Unauthenticated
from barchan.sdk._address import Address
from barchan.sdk._socket import Socket
from barchan.sdk._upgrade import parsed
from barchan.wire.websocket import accept_key

Answer = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[Address]:
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await answer(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        done.set()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Address(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", token="secret")
    finally:
        await done.wait()
        listening.close()


async def opened(raw: bytes) -> BarchanError:
    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await reader.read()  # until the client has had enough

    async with server(answer) as address:
        with pytest.raises(BarchanError) as caught:
            await Socket.open(address, None)
        return caught.value


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", ProtocolError),
        (b"HTTP/1.1 101 X\r\nSec-WebSocket-Accept: c29tZXRoaW5nIGVsc2U=\r\n\r\n", ProtocolError),
        (b"HTTP/1.1 nonsense\r\n\r\n", ProtocolError),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", ProtocolError),
        (b"HTTP/1.1 101 X\r\n" + b"A: b\r\n" * 20_000, ProtocolError),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", Unauthenticated),
        (b"HTTP/1.0 503 Away\r\n\r\n", ApiUnavailable),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ApiUnavailable),
    ],
)
async def test_answers_that_open_nothing(raw: bytes, kind: type[BarchanError]) -> None:
    assert type(await opened(raw)) is kind


async def test_a_head_in_pieces_and_a_frame_right_behind_it() -> None:
    said: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()

    async def answer(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key = re.search(rb"Sec-WebSocket-Key: (\S+)", head)
        assert key
        accept = accept_key(key[1].decode()).encode()
        whole = b"HTTP/1.1 101 Go\r\nSEC-WEBSOCKET-ACCEPT:  " + accept + b"\r\n\r\n" + b"\x89\x02hi"
        for at in range(0, len(whole), 7):
            writer.write(whole[at : at + 7])
            await writer.drain()
        said.set_result((head, await reader.readexactly(8)))
        await reader.read()

    async with server(answer) as address:
        socket = await Socket.open(address, None)
        head, pong = await said
        assert b"\r\nAuthorization: Bearer secret\r\n" in head and head.startswith(b"GET /v1/connect HTTP/1.1\r\n")
        assert pong[:2] == b"\x8a\x82", "a masked answer to the ping"
        await socket.close()
        assert isinstance(socket.link.lost, ApiUnavailable)


def test_names_of_headers_have_no_case() -> None:
    assert parsed(b"HTTP/1.1 101 Go\r\nA-B: c:d") == (101, {"a-b": "c:d"})
