"""What the types of a request let through and a node must never see. Pure."""

from __future__ import annotations

import re

from barchan.errors import InvalidRequest
from barchan.spec import check_exec, check_spec
from barchan.wire.messages import (
    PAGE,
    REQUESTS,
    AttachExec,
    CancelExec,
    CreateSandbox,
    OfFile,
    RenameFile,
    Request,
    SignalExec,
    StartExec,
)

MAX_OFFSET = 1 << 62
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_RANGES: dict[str, tuple[float, float]] = {
    "stdout_offset": (0, MAX_OFFSET),
    "stderr_offset": (0, MAX_OFFSET),
    "offset": (0, MAX_OFFSET),
    "length": (0, MAX_OFFSET),
    "depth": (1, 1 << 16),
    "mode": (0, 0o7777),
    "uid": (0, (1 << 32) - 2),
    "gid": (0, (1 << 32) - 2),
    "signal": (1, 64),
    "idle_timeout": (1e-3, 1e9),
    "lifetime": (1e-3, 1e9),
    "limit": (1, PAGE),
}
_RANGED = {cls: tuple(field for field in cls.__struct_fields__ if field in _RANGES) for cls in REQUESTS.values()}


def check_request(request: Request) -> None:
    """Raises `InvalidRequest` naming the field."""
    for field in _RANGED[type(request)]:
        value = getattr(request, field)
        least, most = _RANGES[field]
        if value is not None and not least <= value <= most:
            raise InvalidRequest(f"{field}: {value} is out of range", field=field, hint=f"{least:g} to {most:g}")
    if isinstance(request, CreateSandbox):
        check_spec(request.spec)
        check_id(request.key, "key")
    elif isinstance(request, OfFile):
        _check_path(request.path, "path")
        if isinstance(request, RenameFile):
            _check_path(request.target, "target")
    elif isinstance(request, (StartExec, AttachExec, SignalExec, CancelExec)):
        check_id(request.id, "id")
        if isinstance(request, StartExec):
            check_exec(request.exec)


def check_id(value: str, field: str) -> str:
    """An id that a caller chose: a command's, or an idempotency key."""
    if not _ID.fullmatch(value):
        raise InvalidRequest(
            f"{field}: {value[:80]!r} is not an id", field=field, hint="1 to 64 of A-Z a-z 0-9 '_' '.' '-'"
        )
    return value


def _check_path(path: bytes, field: str) -> None:
    if b"\0" in path:
        raise InvalidRequest(f"{field}: contains a NUL byte", field=field, hint="no file name can")
    if not path:
        raise InvalidRequest(f"{field}: empty", field=field)
