"""Every route, once: the router and the OpenAPI document are both made from this table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import web

from barchan.api import connect, execs, files, platform, sandboxes
from barchan.api.values import Done, ExecAnswer, ExecBody, ExecRecord, FileEntry, Health, Renewal, SignalBody
from barchan.spec import NodeInfo, SandboxInfo, SandboxSpec
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
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    status: int = 200
    open: bool = False
    """Needs no token."""


_ONE = "/v1/sandboxes/{sandbox}"

ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/sandboxes",
        sandboxes.create,
        "Create a sandbox; answers when it is ready. With `count`, create that many: a line for each as it is ready",
        body=SandboxSpec,
        answer=SandboxInfo,
        lines=Created,
        query=("count",),
        headers=("Idempotency-Key",),
        status=201,
    ),
    Route(
        "GET",
        "/v1/sandboxes",
        sandboxes.find,
        "A page of sandboxes in the order of ids; `label=key=value` and `state` may repeat",
        answer=tuple[SandboxInfo, ...],
        query=tuple(sorted(sandboxes.FILTERS)),
    ),
    Route("GET", _ONE, sandboxes.get, "One sandbox", answer=SandboxInfo),
    Route("GET", f"{_ONE}/stats", sandboxes.stats, "What a sandbox uses; does not count as use", answer=SandboxStats),
    Route("DELETE", _ONE, sandboxes.stop, "Stop a sandbox; repeating it is harmless", answer=SandboxInfo),
    Route(
        "POST",
        f"{_ONE}/renew",
        sandboxes.renew,
        "Count as use; change its time limits",
        body=Renewal,
        answer=SandboxInfo,
    ),
    Route(
        "POST",
        f"{_ONE}/exec",
        execs.run,
        "Run a command and answer with its result and output; hanging up cancels it",
        body=ExecBody,
        answer=ExecAnswer,
    ),
    Route(
        "GET",
        f"{_ONE}/exec",
        execs.history,
        "Commands of a sandbox",
        answer=tuple[ExecRecord, ...],
        query=("after", "limit"),
    ),
    Route(
        "POST", f"{_ONE}/exec/{{exec}}/signal", execs.signal, "Send a signal to a command", body=SignalBody, answer=Done
    ),
    Route(
        "POST",
        f"{_ONE}/exec/{{exec}}/cancel",
        execs.cancel,
        "End a command with all its processes; repeating it is harmless",
        answer=Done,
    ),
    Route("GET", f"{_ONE}/files", files.read, "Read a file", answer=bytes, query=("path", "user")),
    Route(
        "PUT",
        f"{_ONE}/files",
        files.write,
        "Write a file whole, its directories too; `mode` is octal",
        body=bytes,
        answer=Done,
        query=("path", "user", "mode"),
    ),
    Route(
        "GET",
        f"{_ONE}/files/list",
        files.entries,
        "List a directory",
        answer=tuple[FileEntry, ...],
        query=("path", "user", "depth"),
    ),
    Route("GET", "/v1/environments", platform.environments, "Environments", answer=tuple[EnvironmentInfo, ...]),
    Route("GET", "/v1/nodes", platform.nodes, "Connected nodes", answer=tuple[NodeInfo, ...]),
    Route("GET", "/v1/health", platform.health, "Whether the API answers", answer=Health, open=True),
    Route("GET", "/v1/openapi.json", platform.schema, "This document", answer=dict[str, Any]),
    Route("GET", "/v1/connect", connect.connect, "WebSocket of frames for the SDK", status=101),
)
