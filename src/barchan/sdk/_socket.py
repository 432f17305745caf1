"""One WebSocket to the API and the link on it. `_sync/_socket.py` is the same for threads, written by hand."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Self

from barchan.errors import ApiUnavailable, BarchanError
from barchan.sdk._address import Address
from barchan.sdk._upgrade import Opening, upgraded
from barchan.wire.transports import CLOSE_WAIT, WebSocketLink


class Socket:
    """Made by `open`. Once `link` is lost it is of no further use, and closes itself."""

    def __init__(self, address: Address, transport: asyncio.Transport, opening: Opening) -> None:
        self._address = address
        self._web = WebSocketLink(transport, None, dialled=True, lost=self._lost)
        self.link = self._web.link
        opening.hand_on(self._web)

    @classmethod
    async def open(cls, address: Address, tls: ssl.SSLContext | None) -> Self:
        """Raises `ApiUnavailable` when trying again may help, and what else `unreachable` and `refused` say."""
        return cls(address, *await upgraded(address, tls))

    async def close(self) -> None:
        """Send what is waiting, hang up."""
        self._web.close()
        self.link.close(ApiUnavailable("the client is closed"))
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSE_WAIT):
                await self._web.closed.wait()

    def abort(self) -> None:
        """As when the network loses it."""
        self._web.abort()

    def _lost(self) -> BarchanError:
        return ApiUnavailable(f"the connection to {self._address} was lost")
