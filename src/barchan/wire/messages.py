"""Calls on the client and node links: operation names, their arguments and answers.

A CALL frame's payload is msgpack `[operation, arguments]`; REPLY carries the answer, ERROR an `ErrorBody`. Arguments are strict: unknown fields
are refused. Streams of a call (DATA, EOF, CREDIT frames) are described with each operation: 0 flows to the sandbox, 1 and 2 to the caller.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import msgspec

from barchan.errors import ErrorBody, InvalidRequest, ProtocolError
from barchan.packing import PackedLayer, PackOrder
from barchan.spec import (
    BackendName,
    Exec,
    ExecInfo,
    ExecResult,
    FileStat,
    NodeInfo,
    ProcessInfo,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Terminal,
)
from barchan.usage import SandboxStats
from barchan.wire.environments import EnvironmentInfo as EnvironmentInfo
from barchan.wire.environments import ListEnvironments as ListEnvironments
from barchan.wire.environments import LockEnvironment as LockEnvironment
from barchan.wire.environments import PullImage as PullImage
from barchan.wire.fields import field_of
from barchan.wire.frames import Payload
from barchan.wire.request import Request as Request

T = TypeVar("T")


class Hello(Request, frozen=True, kw_only=True):
    """Node to API, first call on a node link, and again whenever `info` changes much."""

    op = "node.hello"
    info: NodeInfo
    sandboxes: tuple[str, ...] = ()
    create_keys: dict[str, str] = {}
    """Recent idempotency keys and the sandboxes they made."""


class NodeStatus(Request, frozen=True, kw_only=True):
    op = "node.status"
    answer = NodeInfo


class ListNodes(Request, frozen=True, kw_only=True):
    """Answered by the API itself: the nodes connected to it."""

    op = "node.list"
    answer = tuple[NodeInfo, ...]


class CreateSandbox(Request, frozen=True, kw_only=True):
    """Answered when the sandbox is ready. The same key with the same spec answers with the same sandbox."""

    op = "sandbox.create"
    answer = SandboxInfo
    spec: SandboxSpec
    key: str


MOST_AT_ONCE = 10_000
"""Sandboxes of one `CreateMany`."""


class CreateMany(Request, frozen=True, kw_only=True):
    """Make `count` sandboxes, each under the key `<key>.<index>`.

    EVENT `Created` for each as it becomes ready or fails, in that order. The caller answers with EVENT `Taken`, which
    makes the ones it has taken its own and lets more be made. REPLY when all are taken. At an ABANDON what was not taken is
    removed, after a lost connection only if no call with the same key comes in time.
    """

    op = "sandbox.create_many"
    spec: SandboxSpec
    key: str
    count: int
    done: tuple[int, ...] = ()
    """Indices that an earlier call of this key was answered for."""


class CancelMany(Request, frozen=True, kw_only=True):
    """End a `CreateMany`, also one whose connection was lost, and remove all that it made but `done`."""

    op = "sandbox.cancel_many"
    key: str
    count: int
    done: tuple[int, ...] = ()


class Created(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of many: `sandbox`, or the `error` for which it could not be made."""

    index: int
    """From 0; the order in which they are begun."""
    sandbox: SandboxInfo | None = None
    error: ErrorBody | None = None
    queued_ms: float = 0.0
    """How long it waited before a node was asked for it."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """The first `count` events of this call are the caller's now."""

    count: int


class AbandonCreate(Request, frozen=True, kw_only=True):
    """API to node: whoever created with this key does not want it. Answered when nothing of it is left."""

    op = "sandbox.abandon"
    key: str


PAGE = 100
"""Most entries of one list answer: ask again with `after` set to the last id of a full page."""


class ListSandboxes(Request, frozen=True, kw_only=True):
    """In the order of their ids; those to which everything given applies. Times are Unix seconds."""

    op = "sandbox.list"
    answer = tuple[SandboxInfo, ...]
    labels: dict[str, str] = {}
    states: tuple[SandboxState, ...] = ()
    """Any of these; empty: those that live."""
    ended: bool = False
    """Also those that stopped or failed, as long as their node remembers them."""
    environment: str | None = None
    """Name of one of its layers, with or without a version, its digest, or what it was asked for by."""
    backend: BackendName | None = None
    node: str | None = None
    prefix: str = ""
    """What the id begins with."""
    created_after: float | None = None
    created_before: float | None = None
    after: str = ""
    limit: int = PAGE


class OfSandbox(Request, frozen=True, kw_only=True):
    """Base of everything that names one sandbox: the API reads the node from `sandbox`."""

    sandbox: str


class GetSandbox(OfSandbox, frozen=True, kw_only=True):
    op = "sandbox.get"
    answer = SandboxInfo


class StopSandbox(OfSandbox, frozen=True, kw_only=True):
    """Idempotent: stopping a stopped sandbox answers with how it ended."""

    op = "sandbox.stop"
    answer = SandboxInfo


class GetStats(OfSandbox, frozen=True, kw_only=True):
    """Does not count as use."""

    op = "sandbox.stats"
    answer = SandboxStats


class RenewSandbox(OfSandbox, frozen=True, kw_only=True):
    """Counts as use; with a value, also changes that limit from now on (seconds)."""

    op = "sandbox.renew"
    answer = SandboxInfo
    idle_timeout: float | None = None
    lifetime: float | None = None


class PackDiff(OfSandbox, frozen=True, kw_only=True):
    """Make a layer of what the sandbox has changed, while it runs. The same key with the same order packs once."""

    op = "sandbox.pack_diff"
    answer = PackedLayer
    order: PackOrder
    key: str


class StartExec(OfSandbox, frozen=True, kw_only=True):
    """Run a command, or take up one with the same id and request that already runs or ran.

    EVENT `ExecStarted` once it runs; streams 0 (if `exec.stdin`), 1, 2; REPLY after both outputs, which tells ends that no EOF told.
    """

    op = "exec.start"
    answer = ExecResult
    id: str
    exec: Exec
    stdout_offset: int = 0
    stderr_offset: int = 0
    stdout_limit: int = 0
    """As a CREDIT frame says it, sent along."""
    stderr_limit: int = 0
    quiet: bool = False
    """No event: the caller waits for the end alone, and a message less is a wake-up less of every process on the way."""


class AttachExec(OfSandbox, frozen=True, kw_only=True):
    """Take up a command by id from the given offsets; streams and answer as with `StartExec`."""

    op = "exec.attach"
    answer = ExecResult
    id: str
    stdout_offset: int = 0
    stderr_offset: int = 0
    stdout_limit: int = 0
    stderr_limit: int = 0


class ExecStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The event of an exec call."""

    id: str
    pid: int
    stdin_offset: int = 0
    """Input bytes already recorded; the caller sends from here."""


class SignalExec(OfSandbox, frozen=True, kw_only=True):
    op = "exec.signal"
    id: str
    signal: int
    everyone: bool = False
    """To every process of the command instead of the main one's group."""


class CancelExec(OfSandbox, frozen=True, kw_only=True):
    """End it with all its processes. The result says `cancelled`."""

    op = "exec.cancel"
    id: str


class ResizeExec(OfSandbox, frozen=True, kw_only=True):
    """Give a command's terminal another size; its foreground programs get SIGWINCH."""

    op = "exec.resize"
    id: str
    size: Terminal


class ListExecs(OfSandbox, frozen=True, kw_only=True):
    """In the order in which they began; of long arguments the beginning. `partial`: also when not all are in the log any more."""

    op = "exec.list"
    answer = tuple[ExecInfo, ...]
    after: str = ""
    limit: int = PAGE
    partial: bool = False


class ListProcesses(OfSandbox, frozen=True, kw_only=True):
    op = "process.list"
    answer = tuple[ProcessInfo, ...]


class OfFile(OfSandbox, frozen=True, kw_only=True):
    """Paths are bytes as the sandbox has them; relative ones start at `/`. `user` None is the sandbox's user."""

    path: bytes
    user: str | None = None


class StatFile(OfFile, frozen=True, kw_only=True):
    op = "file.stat"
    answer = FileStat
    follow: bool = True


class ListFiles(OfFile, frozen=True, kw_only=True):
    """Stream 1: entries as in the guest protocol. Depth 1 is the directory's own entries."""

    op = "file.list"
    depth: int = 1


class ReadFile(OfFile, frozen=True, kw_only=True):
    """Stream 1: the bytes."""

    op = "file.read"
    offset: int = 0
    length: int | None = None


class WriteFile(OfFile, frozen=True, kw_only=True):
    """Stream 0: the bytes, then EOF. The file appears whole or not at all, except with `append`."""

    op = "file.write"
    parents: bool = True
    append: bool = False
    exclusive: bool = False
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None


class MakeDirectory(OfFile, frozen=True, kw_only=True):
    op = "file.mkdir"
    parents: bool = True
    mode: int = 0o755


class RemoveFile(OfFile, frozen=True, kw_only=True):
    op = "file.remove"
    recursive: bool = False
    missing_ok: bool = False


class RenameFile(OfFile, frozen=True, kw_only=True):
    op = "file.rename"
    target: bytes


class GetTree(OfFile, frozen=True, kw_only=True):
    """Stream 1: tree items as in the guest protocol."""

    op = "file.get_tree"


class PutTree(OfFile, frozen=True, kw_only=True):
    """Stream 0: tree items as in the guest protocol. Owners None: as in the items."""

    op = "file.put_tree"
    parents: bool = True
    uid: int | None = None
    gid: int | None = None


def _leaves(cls: type[Request]) -> list[type[Request]]:
    return ([cls] if cls.op else []) + [leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)]


REQUESTS: dict[str, type[Request]] = {cls.op: cls for cls in _leaves(Request)}
_encoder = msgspec.msgpack.Encoder()
_call = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_decoder = functools.cache(msgspec.msgpack.Decoder)  # a client reads no requests, and needs none


def pack(value: Any) -> bytes:
    return _encoder.encode(value)


def unpack(data: Payload, type_: type[T]) -> T:
    """Decode an answer. What does not fit its type is the other side's fault: `ProtocolError`."""
    try:
        return msgspec.msgpack.decode(data, type=type_)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed answer: {error}") from error


def pack_call(request: Request) -> bytes:
    return _encoder.encode((request.op, request))


def unpack_call(data: Payload) -> Request:
    """The request in a CALL frame. Raises `InvalidRequest` naming what does not fit."""
    try:
        op, raw = _call.decode(data)
        if (cls := REQUESTS.get(op)) is None:
            raise InvalidRequest(f"unknown operation {op!r}", field="op")
        request: Request = _decoder(cls).decode(raw)
        return request
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), field=field_of(error)) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"not msgpack: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("nested too deeply") from error
