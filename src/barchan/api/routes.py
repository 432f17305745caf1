"""Every route, once: the router and the OpenAPI document are both made from this table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import web

from barchan.api import connect, execs, files, platform, sandboxes
from barchan.api.queries import CountQuery, FileQuery, FindQuery, HistoryQuery, ListQuery, NoQuery, WriteQuery
from barchan.api.values import Done, ExecAnswer, ExecBody, ExecRecord, FileEntry, Health, PullBody, Renewal, SignalBody
from barchan.errors import (
    AdmissionRefused,
    BarchanError,
    Conflict,
    EnvironmentNotFound,
    ExecNotFound,
    FileFailure,
    ImageDenied,
    ImageNotFound,
    InternalError,
    InvalidRequest,
    LockMismatch,
    LogCorrupt,
    NodeError,
    NodeNotFound,
    NodeStorageFull,
    NodeUnavailable,
    NotSupported,
    OutcomeUnknown,
    ProtocolError,
    SandboxDiskFull,
    SandboxLogFull,
    SandboxNotFound,
    SandboxStopped,
    SandboxUnavailable,
    Unauthenticated,
    UserNotFound,
    tree,
)
from barchan.locks import EnvironmentLock
from barchan.packing import PackedLayer, PackOrder
from barchan.spec import EnvironmentRef, NodeInfo, SandboxInfo, SandboxSpec
from barchan.usage import SandboxStats
from barchan.wire.messages import Created, EnvironmentInfo

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Route(NamedTuple):
    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None
    """Type of the JSON body; `bytes` for a raw one."""
    answer: Any = None
    """Type of the JSON answer; `bytes` for a raw one; None for no body."""
    lines: Any = None
    """Type of each line of the streamed answer (200, NDJSON), where there is one beside `answer`."""
    query: type[NoQuery] = NoQuery
    key: bool = False
    """Takes an `Idempotency-Key`."""
    status: int = 200
    fails: tuple[type[BarchanError], ...] = ()
    """Errors of its own, each with those below it in the tree, beside what `errors_of` adds."""
    open: bool = False
    """Needs no token."""


_ONE = "/v1/sandboxes/{sandbox}"
_EVERYWHERE = (InvalidRequest, InternalError)
_NODES = (NodeUnavailable, ProtocolError, AdmissionRefused, LogCorrupt, NodeStorageFull, OutcomeUnknown)
"""Of whatever a node answers."""
_SANDBOX = (*_NODES, SandboxNotFound, SandboxStopped, SandboxUnavailable, NotSupported)
_FILE = (*_SANDBOX, FileFailure, UserNotFound, SandboxDiskFull)
_NAMES = (EnvironmentNotFound, LockMismatch, ImageNotFound, ImageDenied)
_CREATE = (*_NODES, *_NAMES, Conflict, NotSupported, NodeError, SandboxStopped, SandboxUnavailable)
_EXEC = (*_SANDBOX, Conflict, UserNotFound, SandboxLogFull)
_PACK = (*_SANDBOX, Conflict, EnvironmentNotFound, NodeError, SandboxDiskFull, SandboxLogFull)


def errors_of(route: Route) -> tuple[type[BarchanError], ...]:
    """Every error that the route may answer with."""
    roots = (*_EVERYWHERE, *(() if route.open else (Unauthenticated,)), *route.fails)
    found = {leaf for root in roots for leaf in tree(root)}
    return tuple(cls for cls in tree() if cls in found)


ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/sandboxes",
        sandboxes.create,
        "Create a sandbox; answers when it is ready. With `count`, create that many: a line for each as it is ready",
        body=SandboxSpec,
        answer=SandboxInfo,
        lines=Created,
        query=CountQuery,
        key=True,
        status=201,
        fails=_CREATE,
    ),
    Route(
        "GET",
        "/v1/sandboxes",
        sandboxes.find,
        "A page of sandboxes in the order of ids; `label=key=value` and `state` may repeat",
        answer=tuple[SandboxInfo, ...],
        query=FindQuery,
        fails=(*_NODES, NodeNotFound),
    ),
    Route("GET", _ONE, sandboxes.get, "One sandbox", answer=SandboxInfo, fails=_SANDBOX),
    Route(
        "GET",
        f"{_ONE}/stats",
        sandboxes.stats,
        "What a sandbox uses; does not count as use",
        answer=SandboxStats,
        fails=_SANDBOX,
    ),
    Route(
        "DELETE", _ONE, sandboxes.stop, "Stop a sandbox; repeating it is harmless", answer=SandboxInfo, fails=_SANDBOX
    ),
    Route(
        "POST",
        f"{_ONE}/renew",
        sandboxes.renew,
        "Count as use; change its time limits",
        body=Renewal,
        answer=SandboxInfo,
        fails=_SANDBOX,
    ),
    Route(
        "POST",
        f"{_ONE}/pack",
        sandboxes.pack,
        "Make a layer, or with `whole` an image, of what a running sandbox has changed",
        body=PackOrder,
        answer=PackedLayer,
        key=True,
        status=201,
        fails=_PACK,
    ),
    Route(
        "POST",
        f"{_ONE}/exec",
        execs.run,
        "Run a command and answer with its result and output; hanging up cancels it",
        body=ExecBody,
        answer=ExecAnswer,
        fails=_EXEC,
    ),
    Route(
        "GET",
        f"{_ONE}/exec",
        execs.history,
        "Commands of a sandbox",
        answer=tuple[ExecRecord, ...],
        query=HistoryQuery,
        fails=_SANDBOX,
    ),
    Route(
        "POST",
        f"{_ONE}/exec/{{exec}}/signal",
        execs.signal,
        "Send a signal to a command",
        body=SignalBody,
        answer=Done,
        fails=(*_SANDBOX, ExecNotFound),
    ),
    Route(
        "POST",
        f"{_ONE}/exec/{{exec}}/cancel",
        execs.cancel,
        "End a command with all its processes; repeating it is harmless",
        answer=Done,
        fails=(*_SANDBOX, ExecNotFound),
    ),
    Route("GET", f"{_ONE}/files", files.read, "Read a file", answer=bytes, query=FileQuery, fails=_FILE),
    Route(
        "PUT",
        f"{_ONE}/files",
        files.write,
        "Write a file whole, its directories too; `mode` is octal",
        body=bytes,
        answer=Done,
        query=WriteQuery,
        fails=_FILE,
    ),
    Route(
        "GET",
        f"{_ONE}/files/list",
        files.entries,
        "List a directory",
        answer=tuple[FileEntry, ...],
        query=ListQuery,
        fails=_FILE,
    ),
    Route(
        "GET",
        "/v1/environments",
        platform.environments,
        "Environments",
        answer=tuple[EnvironmentInfo, ...],
        fails=_NODES,
    ),
    Route(
        "POST",
        "/v1/environments/pull",
        platform.pull,
        "Fetch an image from its registry; answers when every node, or the one that is named, has it",
        body=PullBody,
        answer=EnvironmentInfo,
        fails=(*_NODES, ImageNotFound, ImageDenied, NodeNotFound, NotSupported, NodeError),
    ),
    Route(
        "POST",
        "/v1/environments/lock",
        platform.lock,
        "What the names of an environment mean now: the content of a lock file",
        body=EnvironmentRef,
        answer=EnvironmentLock,
        fails=(*_NODES, EnvironmentNotFound, LockMismatch, NotSupported, NodeError),
    ),
    Route("GET", "/v1/nodes", platform.nodes, "Connected nodes", answer=tuple[NodeInfo, ...]),
    Route("GET", "/v1/health", platform.health, "Whether the API answers", answer=Health, open=True),
    Route("GET", "/v1/openapi.json", platform.schema, "This document", answer=dict[str, Any]),
    Route("GET", "/v1/connect", connect.connect, "WebSocket of frames for the SDK", status=101),
)
