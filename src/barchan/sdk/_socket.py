"""One WebSocket to the API and the link on it. `_sync/_socket.py` is the same for threads, written by hand."""

from __future__ import annotations

import ssl
from typing import Any, Self

import aiohttp

from barchan.errors import ApiUnavailable, BarchanError, ProtocolError
from barchan.sdk import _compat
from barchan.sdk._address import Address
from barchan.sdk._failures import refused, unreachable
from barchan.wire.link import Link
from barchan.wire.transports import MAX_MESSAGE, Outbox

HEARTBEAT = 30.0
CLOSE_WAIT = 5.0


class Socket:
    """Made by `open`. Once `link` is lost it is of no further use, and closes itself."""

    def __init__(
        self, address: Address, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse
    ) -> None:
        self._address = address
        self._session = session
        self._socket = socket
        self._outbox = Outbox(socket.send_bytes)
        self.link = Link(self._outbox.write, dialled=True)
        self._tasks: set[_compat.Task[Any]] = set()
        self._sending = _compat.spawn(self._tasks, self._send)
        _compat.spawn(self._tasks, self._receive)

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
        self._outbox.close()
        await _compat.ended({self._sending}, CLOSE_WAIT)
        self.link.close(ApiUnavailable("the client is closed"))
        await self._hang_up()
        await _compat.ended(self._tasks, CLOSE_WAIT)

    async def _hang_up(self) -> None:
        await self._socket.close()
        await self._session.close()

    async def _receive(self) -> None:
        error: BarchanError = ApiUnavailable(f"the connection to {self._address} was lost")
        try:
            async for message in self._socket:
                if message.type == aiohttp.WSMsgType.BINARY:
                    self.link.feed(message.data)
        except ProtocolError as broken:
            error = broken
        finally:
            self.link.close(error)
            self._outbox.close()
            await self._hang_up()

    async def _send(self) -> None:
        try:
            await self._outbox.run()
        except (ConnectionError, aiohttp.ClientError, ApiUnavailable) as error:
            why = f": {error.message}" if isinstance(error, ApiUnavailable) else ""
            self.link.close(ApiUnavailable(f"the connection to {self._address} was lost{why}"))
            await self._hang_up()


def _session(address: Address) -> aiohttp.ClientSession:
    connector = aiohttp.UnixConnector(address.unix) if address.unix else aiohttp.TCPConnector()
    return aiohttp.ClientSession(connector=connector, trust_env=not address.unix)


async def _connected(
    address: Address, session: aiohttp.ClientSession, tls: ssl.SSLContext | None
) -> aiohttp.ClientWebSocketResponse:
    headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
    try:
        return await session.ws_connect(
            f"{address.base}/v1/connect",
            headers=headers,
            max_msg_size=MAX_MESSAGE,
            compress=0,
            heartbeat=HEARTBEAT,
            ssl=tls if tls is not None else True,
        )
    except aiohttp.WSServerHandshakeError as error:
        raise refused(address, error.status) from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise unreachable(address, _cause(error)) from error


def _cause(error: Exception) -> Exception:
    """What the HTTP library wrapped; its own texts name its settings."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return error.certificate_error
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error
    if isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientResponseError)):
        return ConnectionResetError("hung up without an answer")
    return error
