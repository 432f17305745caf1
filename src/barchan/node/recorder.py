"""The one place that writes the trajectory.

Calls are made on the event loop; `journal` makes records of them in the order of the calls, at once or in a thread that writes
and syncs whole groups. Nothing is acknowledged before its record is
written (create, begin of a command, output, input, events) or durable (end of a command, stop): what is written outlives
the agent, and what only a power cut could take away concerns a sandbox that the power cut ends too.

Memory: about 0.5 KB per command of a live sandbox, at most MAX_EXECS of them; pending bytes are bounded by the callers, who
await what they submit and call `room` before they take more from a guest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple, Self, cast

from barchan.config import Layout, NodeConfig
from barchan.errors import (
    AdmissionRefused,
    Conflict,
    ExecNotFound,
    InvalidRequest,
    NodeStorageFull,
    ProtocolError,
    SandboxLogFull,
    SandboxNotFound,
)
from barchan.node.journal import Journal, LogLimits
from barchan.node.recorded import Recorded
from barchan.node.writer import Job
from barchan.packing import PackedLayer, PackOrder
from barchan.sizes import size
from barchan.spec import Exec, ExecResult, SandboxSpec, Terminal
from barchan.trajectory.index import ExecState, Index
from barchan.trajectory.log import Log
from barchan.trajectory.record import (
    Body,
    Created,
    Event,
    ExecBegun,
    ExecEnded,
    FileBegun,
    FileEnded,
    Input,
    InputEnd,
    Kind,
    Output,
    PackBegun,
    PackEnded,
    Position,
    Resize,
    Signal,
    Stopped,
)
from barchan.trajectory.redact import Redactor
from barchan.wire.frames import Payload

CLOCK_SLACK = 3600.0
"""Seconds by which the host's clock may have been set back while a sandbox lived."""
MAX_EXECS = 500_000
"""Commands of live sandboxes that one node keeps ready to answer for."""

Send = Callable[[int], None]


class Begun(NamedTuple):
    seq: int
    """The guest's operation id."""
    fresh: bool
    """False when this id with the same request is known: it must not be started again."""


class PackIntent(NamedTuple):
    repeated: bool
    """An earlier agent had begun the same, and may have come to its end."""
    packed: PackedLayer | None
    """What came of it, if that is recorded."""


class Recorder(Recorded):
    """Use as a context manager: `async with await Recorder.open(…)`."""

    def __init__(self, log: Log, index: Index, redactor: Redactor, limits: LogLimits, sandbox_log: int) -> None:
        self.redactor = redactor
        super().__init__(log, index.execs)
        self._index = index
        self._sandbox_log = sandbox_log
        self._journal = Journal(log, index, limits, self._publish)

    @classmethod
    async def open(cls, layout: Layout, config: NodeConfig, *, live: Collection[str] = (), since: float = 0.0) -> Self:
        """Read the log and take in what concerns the `live` sandboxes, the oldest made at `since` (Unix seconds).

        Raises `LogCorrupt`, `NodeStorageFull`.
        """
        index = Index(live)
        redactor = await asyncio.to_thread(Redactor.load, layout.data)
        since -= CLOCK_SLACK
        log = await asyncio.to_thread(Log.open, layout.log, config.segment_bytes, visit=index.apply, since=since)
        limits = LogLimits(config.log_bytes, config.log_most or 4 * config.log_bytes)
        return cls(log, index, redactor, limits, config.sandbox_log or config.log_bytes // 2)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Write and sync what was submitted. Safe twice."""
        await self._journal.close()

    async def room(self) -> None:
        """Wait while 64 MiB or more are pending: before taking more output from a guest."""
        await self._journal.room()

    # --- durable

    async def create(self, sandbox: str, spec: SandboxSpec, key: str = "") -> int:
        """The first record of a sandbox; `Conflict` if it has one, `NodeStorageFull` while the log is too long. Returns its seq, 1."""
        body = Created(self.redactor.spec(spec))

        def run() -> int:
            self._check_log()
            if sandbox not in self._index.sandboxes:
                self._index.add(sandbox)
            elif self._index.sandboxes[sandbox].last_seq:
                raise Conflict(f"sandbox {sandbox} is recorded already")
            return self._journal.put(sandbox, Kind.CREATE, key, body, None)

        return cast(int, await self._journal.submit(Job(run, durable=False, ordered=sandbox)))

    async def begin_exec(self, sandbox: str, exec_id: str, request: Exec, *, send: Send | None = None) -> Begun:
        """Record the intent to run a command. `send(seq)` is called for a fresh one, per sandbox in rising order of seq.

        Raises `Conflict` when the id stands for another request, `AdmissionRefused` beyond MAX_EXECS, `SandboxLogFull` and
        `NodeStorageFull` while the record is too long. Of what runs, the output is bounded by its callers, and recorded.
        """
        if not exec_id:
            raise InvalidRequest("exec id: empty", field="id")
        redacted = self.redactor.exec(request)
        body = ExecBegun(self.redactor.digest(redacted), redacted)

        def run() -> Begun:
            if known := self._execs(sandbox).get(exec_id):
                return _repeated(known, body.digest)
            self._check_log(sandbox)
            self._check_count()
            return Begun(self._journal.put(sandbox, Kind.EXEC_BEGIN, exec_id, body, None), True)

        def done(begun: Begun) -> None:
            if send and begun.fresh:
                send(begun.seq)

        return cast(Begun, await self._journal.submit(Job(run, durable=False, ordered=sandbox, done=done)))

    async def end_exec(self, sandbox: str, exec_id: str, result: ExecResult) -> ExecResult:
        """Record how a command ended, once: a repeated call gets the result that is recorded."""
        body = ExecEnded(result)

        def run() -> Position | None:
            state = self._exec(sandbox, exec_id)
            if state.ended:
                return state.newest
            self._journal.put(sandbox, Kind.EXEC_END, exec_id, body, state.newest)
            return None

        before = cast(Position | None, await self._journal.submit(Job(run, durable=True)))
        return result if before is None else await asyncio.to_thread(self._read_result, before)

    async def stop(self, sandbox: str, reason: str, *, failed: bool = False) -> int:
        """Recorded once, also when an agent was killed between this and the registry's update."""
        return await self._whole(sandbox, Kind.STOP, Stopped(reason, failed), durable=True)

    def end_of(self, sandbox: str) -> Stopped | None:
        """Its recorded end, if the registry has not heard of it. Blocking."""
        state = self._index.sandboxes.get(sandbox)
        if state is None or not state.stopped or state.newest is None:
            return None
        body = self._log.read(state.newest).body
        return body if isinstance(body, Stopped) else Stopped("stopped")

    async def event(self, sandbox: str, name: str, detail: bytes = b"", *, durable: bool = False) -> int:
        """Anything else worth knowing of a sandbox. Returns its seq."""
        return await self._whole(sandbox, Kind.EVENT, Event(name, detail), durable=durable)

    def _whole(self, sandbox: str, kind: Kind, body: Body, *, durable: bool) -> Awaitable[int]:
        def run() -> int:
            self._execs(sandbox)
            state = self._index.sandboxes[sandbox]
            if kind == Kind.STOP and state.stopped:
                return state.last_seq
            return self._journal.put(sandbox, kind, "", body, state.newest)

        return self._journal.submit(Job(run, durable=durable))

    # --- written

    def output(self, sandbox: str, exec_id: str, stream: int, offset: int, data: Payload) -> asyncio.Future[int]:
        """Resolves to the bytes of the stream recorded so far. What is recorded already is not recorded again.

        `ProtocolError` when bytes before `offset` are missing. Output of a command that has ended is ignored.
        """
        return self._data(sandbox, exec_id, stream, offset, data)

    def input(self, sandbox: str, exec_id: str, offset: int, data: Payload) -> asyncio.Future[int]:
        """As `output`, for what the caller sends to the program."""
        return self._data(sandbox, exec_id, 0, offset, data)

    def _data(self, sandbox: str, exec_id: str, stream: int, offset: int, data: Payload) -> asyncio.Future[int]:
        kind = Kind.OUTPUT if stream else Kind.INPUT

        def run() -> int:
            state = self._exec(sandbox, exec_id)
            known, end = state.recorded(stream), offset + len(data)
            if offset > known and not state.ended:
                raise ProtocolError(f"{exec_id}: stream {stream} continues at {offset}, recorded are {known} bytes")
            if end <= known or state.ended:
                return known
            new = cast(bytes, memoryview(data)[known - offset :])  # encoded where it is
            body = Output(stream, known, new) if stream else Input(known, new)
            self._journal.put(sandbox, kind, exec_id, body, state.newest)
            return end

        return self._journal.submit(Job(run, size=len(data) + 256))

    async def input_end(self, sandbox: str, exec_id: str, total: int) -> None:
        """The caller sends no more input after `total` bytes. Recorded once."""

        def run() -> None:
            state = self._exec(sandbox, exec_id)
            if not state.stdin_ended and not state.ended:
                self._journal.put(sandbox, Kind.INPUT_END, exec_id, InputEnd(total), state.newest)

        await self._journal.submit(Job(run))

    async def signal(self, sandbox: str, exec_id: str, number: int, everyone: bool = False) -> None:
        """A signal that is about to be sent; none is recorded after the end."""
        await self._while_running(sandbox, exec_id, Kind.SIGNAL, Signal(number, everyone))

    async def resize(self, sandbox: str, exec_id: str, size: Terminal) -> None:
        """As `signal`, for a new size of the command's terminal."""
        await self._while_running(sandbox, exec_id, Kind.RESIZE, Resize(size.rows, size.columns))

    def _while_running(self, sandbox: str, exec_id: str, kind: Kind, body: Body) -> Awaitable[None]:
        def run() -> None:
            state = self._exec(sandbox, exec_id)
            if not state.ended:
                self._journal.put(sandbox, kind, exec_id, body, state.newest)

        return self._journal.submit(Job(run))

    async def settled(self, sandbox: str) -> None:
        """Wait until every command whose begin was submitted before is seen, and was handed to its `send`."""
        await self._journal.submit(Job(lambda: None, ordered=sandbox))

    async def begin_file(
        self, sandbox: str, key: str, verb: str, path: bytes, *, user: str = "", send: Send | None = None
    ) -> int:
        """A guest operation that is no command. Returns its seq, in order with those of `begin_exec`."""
        body = FileBegun(verb, path, user)

        def run() -> int:
            self._execs(sandbox)
            return self._journal.put(sandbox, Kind.FILE, key, body, None)

        return cast(int, await self._journal.submit(Job(run, ordered=sandbox, done=send)))

    async def end_file(self, sandbox: str, seq: int, *, size: int = 0, digest: bytes = b"", error: str = "") -> None:
        """How it ended; a second end is ignored."""
        body = FileEnded(size, digest, error)

        def run() -> None:
            self._execs(sandbox)
            if begun := self._index.files[sandbox].get(seq):
                self._journal.put(sandbox, Kind.FILE_END, begun[0], body, begun[1])

        await self._journal.submit(Job(run))

    async def begin_pack(self, sandbox: str, key: str, order: PackOrder) -> PackIntent:
        """Record the intent to pack, unless this was done already. One that failed may be begun again under its key.

        Raises `Conflict` when the key stands for another request, else as `begin_exec`.
        """
        body = PackBegun(self.redactor.digest(order), order)

        def run() -> tuple[bool, Position | None]:
            self._execs(sandbox)
            known = self._index.packs[sandbox].get(key)
            if known is not None and known.digest != body.digest:
                raise Conflict(f"key {key} was used for a different request", hint="use a new key", field="key")
            if known is None or known.end is None:
                self._check_log(sandbox)
                self._check_count()
                self._journal.put(sandbox, Kind.PACK, key, body, None)
            return known is not None, known.end if known is not None else None

        repeated, end = cast("tuple[bool, Position | None]", await self._journal.submit(Job(run)))
        return PackIntent(repeated, await asyncio.to_thread(self._read_packed, end) if end is not None else None)

    async def end_pack(self, sandbox: str, key: str, packed: PackedLayer | None, error: str = "") -> None:
        """How it ended; durable when it made a layer. Ignored once the sandbox has ended."""

        def run() -> None:
            state = self._index.packs.get(sandbox, {}).get(key)
            if state is not None and state.end is None and not self._index.sandboxes[sandbox].stopped:
                self._journal.put(sandbox, Kind.PACK_END, key, PackEnded(packed, error), state.first)

        await self._journal.submit(Job(run, durable=packed is not None))

    def forget(self, sandbox: str) -> None:
        """After its stop: nothing more can be recorded, and its segments may be removed when space is needed."""
        self._journal.submit(Job(lambda: self._journal.forget(sandbox)))

    def last_seq(self, sandbox: str) -> int:
        """0 for a sandbox without a record."""
        state = self._index.sandboxes.get(sandbox)
        return state.last_seq if state else 0

    def _check_log(self, sandbox: str = "") -> None:
        if self._journal.over:
            raise NodeStorageFull(
                "the log of this node is as long as it may get",
                hint="stop sandboxes: what is recorded of those that live is kept (log_most)",
            )
        if sandbox and self._index.sandboxes[sandbox].size > self._sandbox_log:
            raise SandboxLogFull(
                f"sandbox {sandbox} has {size(self._sandbox_log)} on record, the most that one may have (sandbox_log)",
                hint="go on in a new one, and set output_limit for commands that write much",
            )

    def _check_count(self) -> None:
        if self._index.count >= MAX_EXECS:
            raise AdmissionRefused(f"this node holds {MAX_EXECS} commands", hint="stop sandboxes with long histories")

    def _execs(self, sandbox: str) -> dict[str, ExecState]:
        try:
            return self._index.execs[sandbox]
        except KeyError:
            raise SandboxNotFound(f"no sandbox {sandbox} is recorded here") from None

    def _exec(self, sandbox: str, exec_id: str) -> ExecState:
        try:
            return self._execs(sandbox)[exec_id]
        except KeyError:
            raise ExecNotFound(f"sandbox {sandbox} has no command {exec_id}") from None


def _repeated(known: ExecState, digest: bytes) -> Begun:
    if known.digest != digest:
        raise Conflict(f"exec id {known.id} was used for a different request", hint="use a new id", field="id")
    return Begun(known.seq, False)
