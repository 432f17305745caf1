"""What the types of a request let through and a node must never see. Pure."""

from __future__ import annotations

import math
import re

from barchan.environments import check_environment
from barchan.errors import InvalidRequest
from barchan.image_refs import parse_image
from barchan.names import check_name, check_ref
from barchan.packing import check_order
from barchan.spec import check_exec, check_spec, check_terminal, check_user
from barchan.wire.messages import (
    MOST_AT_ONCE,
    PAGE,
    REQUESTS,
    AttachExec,
    CancelExec,
    CancelMany,
    CreateMany,
    CreateSandbox,
    ListSandboxes,
    LockEnvironment,
    OfFile,
    PackDiff,
    PullImage,
    RenameFile,
    Request,
    ResizeExec,
    SignalExec,
    StartExec,
)

MAX_OFFSET = 1 << 62
MOST_KEY = 56
"""Characters of the key of many: an index is added for each."""
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_RANGES: dict[str, tuple[float, float]] = {
    "stdout_offset": (0, MAX_OFFSET),
    "stderr_offset": (0, MAX_OFFSET),
    "stdout_limit": (0, MAX_OFFSET),
    "stderr_limit": (0, MAX_OFFSET),
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
    "count": (1, MOST_AT_ONCE),
    "created_after": (-math.inf, math.inf),
    "created_before": (-math.inf, math.inf),
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
    elif isinstance(request, PackDiff):
        check_order(request.order)
        check_id(request.key, "key")
    elif isinstance(request, (CreateMany, CancelMany)):
        _check_many(request)
    elif isinstance(request, PullImage):
        parse_image(request.image, "image")
        check_ref(request.image, "image")
        if request.node is not None:
            check_name(request.node, "node")
    elif isinstance(request, LockEnvironment):
        check_environment(request.environment)
    elif isinstance(request, ListSandboxes):
        _check_filters(request)
    elif isinstance(request, OfFile):
        _check_path(request.path, "path")
        if request.user is not None:
            check_user(request.user)
        if isinstance(request, RenameFile):
            _check_path(request.target, "target")
    elif isinstance(request, (StartExec, AttachExec, SignalExec, ResizeExec, CancelExec)):
        check_id(request.id, "id")
        if isinstance(request, StartExec):
            check_exec(request.exec)
        elif isinstance(request, ResizeExec):
            check_terminal(request.size)


def _check_many(request: CreateMany | CancelMany) -> None:
    if isinstance(request, CreateMany):
        check_spec(request.spec)
    check_id(request.key, "key")
    if len(request.key) > MOST_KEY:
        raise InvalidRequest(f"key: {len(request.key)} characters", field="key", hint=f"at most {MOST_KEY} here")
    if any(not 0 <= index < request.count for index in request.done):
        raise InvalidRequest("done: an index is out of range", field="done", hint=f"0 to {request.count - 1}")


def _check_filters(request: ListSandboxes) -> None:
    if request.environment is not None:
        check_ref(request.environment, "environment")
    if request.node is not None:
        check_name(request.node, "node")


def check_id(value: str, field: str) -> str:
    """An id that a caller chose: a command's, or an idempotency key."""
    if not ID.fullmatch(value):
        raise InvalidRequest(
            f"{field}: {value[:80]!r} is not an id", field=field, hint="1 to 64 of A-Z a-z 0-9 '_' '.' '-'"
        )
    return value


def _check_path(path: bytes, field: str) -> None:
    _no_nul(path, field)
    if not path:
        raise InvalidRequest(f"{field}: empty", field=field)


def _no_nul(value: bytes, field: str) -> None:
    if b"\0" in value:
        raise InvalidRequest(f"{field}: contains a NUL byte", field=field, hint="no name can")
