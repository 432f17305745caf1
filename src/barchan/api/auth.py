"""Who may ask. The unix socket trusts root and our own user; everything else shows the bearer token."""

from __future__ import annotations

import hmac
import socket

from aiohttp import web

from barchan.control.nodes import peer_uid, trusted_uid
from barchan.errors import Unauthenticated


class Auth:
    """`token` None: no token exists, so only the unix socket works."""

    def __init__(self, token: bytes | None) -> None:
        self._token = token

    def check(self, request: web.BaseRequest) -> None:
        """Raises `Unauthenticated`. Never says whether a token was close."""
        sock = request.transport.get_extra_info("socket") if request.transport is not None else None
        if sock is not None and sock.family == socket.AF_UNIX and trusted_uid(peer_uid(sock)):
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if not given:
            raise Unauthenticated("no token", hint="send `Authorization: Bearer …` with DATA/token, or use the socket")
        given_bytes = given.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() != "bearer" or not self._token or not hmac.compare_digest(given_bytes, self._token):
            raise Unauthenticated("wrong token", hint="the token is in DATA/token on the API's host")
