"""One WebSocket to the API and the link on it. `_sync/_socket.py` is the same for threads, written by hand."""

from __future__ import annotations

import asyncio
import ssl
from typing import Self

import aiohttp

from barchan.errors import ApiUnavailable, BarchanError, ProtocolError
from barchan.sdk import _compat
from barchan.sdk._address import Address
from barchan.sdk._failures import refused, unreachable
from barchan.wire.transports import CLOSE_WAIT, WebSocketLink
from barchan.wire.websocket import accept_key, new_key

_PATIENCE = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=30)


class Socket:
    """Made by `open`. Once `link` is lost it is of no further use, and closes itself."""

    def __init__(self, address: Address, session: aiohttp.ClientSession, response: aiohttp.ClientResponse) -> None:
        connection = response.connection
        if connection is None or connection.protocol is None or connection.transport is None:
            raise ApiUnavailable(f"the connection to {address} was lost")
        self._address = address
        self._session = session
        self._response = response
        self._web = WebSocketLink(connection.transport, None, dialled=True, lost=self._lost)
        self.link = self._web.link
        connection.protocol.read_timeout = None
        connection.protocol.set_parser(self._web, None)
        self._ending = asyncio.get_running_loop().create_task(self._end())

    @classmethod
    async def open(cls, address: Address, tls: ssl.SSLContext | None) -> Self:
        """Raises `ApiUnavailable` when trying again may help, and what else `unreachable` and `refused` say."""
        session = _session(address)
        try:
            return cls(address, session, await _connected(address, session, tls))
        except BaseException:
            await session.close()
            raise

    async def close(self) -> None:
        """Send what is waiting, hang up."""
        self._web.close()
        self.link.close(ApiUnavailable("the client is closed"))
        await _compat.ended({self._ending}, 2 * CLOSE_WAIT)

    def abort(self) -> None:
        """As when the network loses it."""
        self._web.abort()

    async def _end(self) -> None:
        await self._web.closed.wait()
        self._response.close()
        await self._session.close()

    def _lost(self) -> BarchanError:
        return ApiUnavailable(f"the connection to {self._address} was lost")


def _session(address: Address) -> aiohttp.ClientSession:
    connector = aiohttp.UnixConnector(address.unix) if address.unix else aiohttp.TCPConnector()
    return aiohttp.ClientSession(connector=connector, trust_env=not address.unix, timeout=_PATIENCE)


async def _connected(
    address: Address, session: aiohttp.ClientSession, tls: ssl.SSLContext | None
) -> aiohttp.ClientResponse:
    """The client's half of the handshake."""
    headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
    key = new_key()
    headers |= {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key,
    }
    try:
        response = await session.get(
            f"{address.base}/v1/connect", headers=headers, allow_redirects=False, ssl=tls if tls is not None else True
        )
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise unreachable(address, _cause(error)) from error
    if response.status != 101:
        raise refused(address, response.status)
    if response.headers.get("Sec-WebSocket-Accept") != accept_key(key):
        raise ProtocolError(f"{address} did not open a WebSocket")
    return response


def _cause(error: Exception) -> Exception:
    """What the HTTP library wrapped; its own texts name its settings."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return error.certificate_error
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientResponseError)):
        return ConnectionResetError("hung up without an answer")
    return error
