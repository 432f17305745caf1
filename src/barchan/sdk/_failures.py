"""Why the API could not be reached, and what to do about it. Pure: foreign errors in, ours out."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path

from barchan.errors import ApiUnavailable, BarchanError, InvalidRequest, ProtocolError, Unauthenticated
from barchan.sdk._address import Address


def unreachable(address: Address, error: Exception) -> BarchanError:
    """`ApiUnavailable` when trying again may help; a `CallerError` when the address or its options are wrong."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _untrusted(address, error)
    if isinstance(error, ssl.SSLError):
        return _no_tls(address)
    if address.unix:
        return _no_socket(address, error)
    if isinstance(error, ConnectionResetError):
        return _hung_up(address)
    return ApiUnavailable(f"no API at {address}: {_why(error)}", hint=f"does an API listen at {address.base}?")


def refused(address: Address, status: int) -> BarchanError:
    """The answer was no WebSocket."""
    if status in (401, 403):
        hint = "it is in DATA/token on its host: `token=`, `--token-file` of the command, or BARCHAN_TOKEN"
        said = "refused the token: it is not that server's" if address.token else "asks for a token, and none was given"
        return Unauthenticated(f"{address} {said}", hint=hint)
    if status in (502, 503, 504):
        return ApiUnavailable(f"{address} answered {status}")
    if status == 400 and address.base.startswith("http://") and not address.unix:
        return _hung_up(address)
    return ProtocolError(f"{address} answered {status} instead of opening a WebSocket")


def _untrusted(address: Address, error: ssl.SSLCertVerificationError) -> BarchanError:
    return InvalidRequest(
        f"the certificate of {address} is not trusted: {error.verify_message}",
        field="ca",
        hint="give the certificate to trust as `ca=` (`--ca-file` of the command)",
    )


def _no_tls(address: Address) -> BarchanError:
    return InvalidRequest(
        f"{address} does not speak TLS as this client does", field="url", hint="is it `http://` that it serves?"
    )


def _hung_up(address: Address) -> BarchanError:
    if address.base.startswith("https:"):
        return ApiUnavailable(f"{address} hung up without an answer")
    secure = address.base.replace("http:", "https:", 1)
    return ApiUnavailable(f"{address} hung up without an answer", hint=f"if it serves TLS, write {secure}")


def _no_socket(address: Address, error: Exception) -> BarchanError:
    if isinstance(error, PermissionError):
        who = _owner(address.unix)
        return Unauthenticated(
            f"no permission to use {address}: it is for root{who} only", hint="or use a URL and a token"
        )
    return ApiUnavailable(f"no API at {address}: {_why(error)}", hint=address.start)


def _owner(path: str) -> str:
    try:
        uid = os.stat(Path(path).parent).st_uid
    except OSError:
        return " or its owner"
    return f" or its owner (user {uid})" if uid else ""


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return "no such host name is known"
    if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
        return os.strerror(error.errno).lower()
    return "the connection failed"
