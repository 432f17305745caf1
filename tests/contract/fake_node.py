"""A node agent that plays from a script, on a real link over the real unix socket.

Commands are words, with or without a shell in front:

    echo TEXT…          cat          exit N         bytes N [STREAM]     args
    sleep               hold NAME    missing        signal N             env

`bytes N` writes N bytes as credit allows; `hold NAME` prints `before`, waits for `node.release(NAME)`, prints `after`. A sandbox
with the label `fail=CODE` answers creates with that error. Everything survives `drop()`, as with a real agent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from barchan.environments import PullProgress
from barchan.errors import (
    AdmissionRefused,
    ApiUnavailable,
    BarchanError,
    Conflict,
    EnvironmentNotFound,
    ExecNotFound,
    FileAlreadyExists,
    FileMissing,
    ImageNotFound,
    SandboxNotFound,
    tree,
)
from barchan.locks import EnvironmentLock, LockedImage
from barchan.packing import PackedLayer, PackOrder
from barchan.spec import (
    Exec,
    ExecId,
    ExecInfo,
    ExecResult,
    FileStat,
    NodeInfo,
    NodeName,
    ProcessInfo,
    SandboxId,
    SandboxInfo,
)
from barchan.usage import SandboxStats
from barchan.wire import messages as m
from barchan.wire.frames import CHUNK, STDERR, STDIN, STDOUT, Frame, FrameType, decode_data, decode_u64
from barchan.wire.guest import Cursor, Entry, blobs, encode_entry, read_entry
from barchan.wire.ids import new_id
from barchan.wire.link import Incoming
from barchan.wire.transports import LinkProtocol

WINDOW = 256 << 10
PATTERN = bytes(range(256)) * (CHUNK // 256)


class Output:
    """One stream of a command: bytes kept, or a pattern of a given length that costs no memory."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.generated = 0
        self.dropped = 0
        self.ended = False
        self.changed = asyncio.Event()

    @property
    def size(self) -> int:
        return self.generated or len(self.data)

    def write(self, data: bytes) -> None:
        self.data += data
        self.changed.set()

    def end(self) -> None:
        self.ended = True
        self.changed.set()

    def slice(self, start: int, end: int) -> bytes:
        if not self.generated:
            return bytes(self.data[start:end])
        skip = start % 256
        return PATTERN[skip : skip + min(end - start, CHUNK - 256)]


class Command:
    """A running or ended command; lives on while no call is attached."""

    def __init__(self, id_: str, request: Exec) -> None:
        self.id = ExecId(id_)
        self.request = request
        self.started = time.time()
        self.outputs = {STDOUT: Output(), STDERR: Output()}
        self.input = bytearray()
        self.input_ended = asyncio.Event()
        self.input_changed = asyncio.Event()
        self.signals: list[int] = []
        self.ending: asyncio.Future[tuple[str, int | None]] = asyncio.get_running_loop().create_future()
        self.result: ExecResult | None = None
        self.done = asyncio.Event()

    def finish(self, outcome: str, code: int | None = None) -> None:
        if self.result is not None:
            return
        for output in self.outputs.values():
            output.end()
        self.result = ExecResult(
            id=self.id,
            outcome=outcome,  # type: ignore[arg-type]
            exit_code=code,
            signal=code - 128 if outcome == "signaled" and code else None,
            stdout_bytes=self.outputs[STDOUT].size,
            stderr_bytes=self.outputs[STDERR].size,
        )
        self.done.set()


class FakeNode:
    """One node. `async with FakeNode(socket) as node`."""

    def __init__(self, socket: Path, name: str = "n1", capacity: int = 1000) -> None:
        self.socket = socket
        self.name = NodeName(name)
        self.capacity = capacity
        self.refuse = ""
        """A reason to refuse every create with."""
        self.progress: tuple[PullProgress, ...] = ()
        """What is said of each image that is pulled, and before each sandbox that is made."""
        self.images: tuple[str, ...] = ()
        """That can be pulled."""
        self.lacks: tuple[str, ...] = ()
        """Environments that it does not know."""
        self.create_gate: asyncio.Event | None = None
        self.sandboxes: dict[str, SandboxInfo] = {}
        self.packed: dict[tuple[str, str], PackOrder] = {}
        self.keys: dict[str, tuple[Any, str]] = {}
        self.commands: dict[str, dict[str, Command]] = {}
        self.files: dict[bytes, bytes] = {}
        self.modes: dict[bytes, int] = {}
        self.trees: dict[bytes, bytes] = {}
        """Raw answers of get_tree by path, for hostile ones."""
        self.faults: dict[bytes, tuple[int, str]] = {}
        """Paths whose reading fails after so many bytes with the error of this code; as a guest, with an end of the stream."""
        self.tells_start = True
        """Whether commands are answered with ExecStarted."""
        self.start_gate: asyncio.Event | None = None
        """What a new command waits for before anybody knows of it."""
        self.received: list[tuple[Entry, bytes]] = []
        """What put_tree got."""
        self.calls: list[m.Request] = []
        self.seen = asyncio.Event()
        self.gates: dict[str, asyncio.Event] = {}
        self.most_ahead = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._protocol: LinkProtocol | None = None

    async def __aenter__(self) -> Self:
        await self.dial()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.drop()

    async def dial(self) -> None:
        """Connect and say hello. Also after `drop`."""

        def protocol() -> LinkProtocol:
            return LinkProtocol(self._serve, dialled=True, lost=lambda: ApiUnavailable("API gone"))

        _, self._protocol = await asyncio.get_running_loop().create_unix_connection(protocol, str(self.socket))
        await self.hello()

    async def hello(self) -> None:
        assert self._protocol is not None
        hello = m.Hello(
            info=self.info(),
            sandboxes=tuple(self.sandboxes),
            create_keys={key: sandbox for key, (_, sandbox) in self.keys.items()},
        )
        await self._protocol.link.call(m.pack_call(hello)).answer

    def blink(self) -> None:
        """Lose the connection and come back. For handlers, which end with their connection."""
        self.drop()
        self._spawn(self.dial())

    def drop(self) -> None:
        """Lose the connection, as when the agent is killed. Commands go on."""
        if self._protocol is not None:
            self._protocol.close()
            self._protocol = None

    def release(self, name: str) -> None:
        self.gate(name).set()

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    def info(self) -> NodeInfo:
        return NodeInfo(
            name=self.name,
            backends=("container",),
            kernel="full",
            sandboxes=len(self.sandboxes),
            capacity=self.capacity,
            memory_total=1 << 40,
            memory_promised=0,
            disk_total=1 << 40,
            disk_promised=0,
        )

    async def wait_for(self, op: type[m.Request], count: int = 1) -> None:
        """Until `count` calls of that type have come."""
        while sum(isinstance(call, op) for call in self.calls) < count:
            self.seen.clear()
            await self.seen.wait()

    async def _serve(self, call: Incoming) -> bytes:
        request = m.unpack_call(call.payload)
        self.calls.append(request)
        self.seen.set()
        if isinstance(request, m.OfSandbox) and request.sandbox not in self.sandboxes:
            raise SandboxNotFound(f"no sandbox {request.sandbox}")
        handler = getattr(self, "_" + request.op.replace(".", "_"))
        return m.pack(await handler(call, request))

    # sandboxes

    async def _sandbox_create(self, call: Incoming, request: m.CreateSandbox) -> SandboxInfo:
        if request.key in self.keys:
            spec, sandbox = self.keys[request.key]
            if spec != request.spec:
                raise Conflict("the key was used for another spec", field="key")
            return self.sandboxes[sandbox]
        if self.refuse:
            raise AdmissionRefused(self.refuse)
        if "fail" in request.spec.labels:
            raise scripted_error(request.spec.labels["fail"])
        for progress in self.progress:
            call.event(progress)
        if self.create_gate is not None:
            await self.create_gate.wait()
        now, id_ = time.time(), SandboxId(f"{self.name}-{new_id()}")
        info = SandboxInfo(
            id=id_,
            state="ready",
            backend=request.spec.backend,
            environment=request.spec.environment,
            limits=request.spec.limits,
            labels=request.spec.labels,
            created=now,
            last_used=now,
            expires=now + request.spec.lifetime,
            ready_ms=1.0,
        )
        self.sandboxes[id_] = info
        self.keys[request.key] = (request.spec, id_)
        self.commands[id_] = {}
        return info

    async def _sandbox_list(self, call: Incoming, request: m.ListSandboxes) -> list[SandboxInfo]:
        wanted = request.labels.items()
        return [info for info in self.sandboxes.values() if wanted <= info.labels.items()]

    async def _sandbox_get(self, call: Incoming, request: m.GetSandbox) -> SandboxInfo:
        return self.sandboxes[request.sandbox]

    async def _sandbox_stats(self, call: Incoming, request: m.GetStats) -> SandboxStats:
        info = self.sandboxes[request.sandbox]
        return SandboxStats(
            id=info.id, since=info.created, at=time.time(), memory=4096, memory_peak=None,
            cpu_user=0.5, cpu_system=0.25, pids=2, processes=1, disk=8192,
        )  # fmt: skip

    async def _sandbox_pack_diff(self, call: Incoming, request: m.PackDiff) -> PackedLayer:
        order, info = request.order, self.sandboxes[request.sandbox]
        known = self.packed.setdefault((request.sandbox, request.key), order)
        if known != order:
            raise Conflict("the key was used for another order", field="key")
        return PackedLayer(
            name=order.name, version=1, reference=f"{order.name}@1", digest="sha256:" + "a" * 64, layer="sha256:" + "b" * 64,
            layers=2 if order.whole else 1, sandbox=info.id, size=4096, left_out={"logs": 2},
        )  # fmt: skip

    async def _sandbox_stop(self, call: Incoming, request: m.StopSandbox) -> SandboxInfo:
        for command in self.commands[request.sandbox].values():
            command.finish("cancelled")
        return self._change(request.sandbox, state="stopped", reason="asked")

    async def _sandbox_renew(self, call: Incoming, request: m.RenewSandbox) -> SandboxInfo:
        info = self.sandboxes[request.sandbox]
        expires = info.created + request.lifetime if request.lifetime is not None else info.expires
        return self._change(request.sandbox, last_used=time.time(), expires=expires)

    def _change(self, sandbox: str, **changes: Any) -> SandboxInfo:
        info = msgspec.structs.replace(self.sandboxes[sandbox], **changes)
        self.sandboxes[sandbox] = info
        return info

    async def _environment_list(self, call: Incoming, request: m.ListEnvironments) -> list[m.EnvironmentInfo]:
        return [m.EnvironmentInfo(name="debian-12", version=3, digest="sha256:" + "0" * 64, size=1, created=1.0)]

    async def _environment_pull(self, call: Incoming, request: m.PullImage) -> m.EnvironmentInfo:
        for progress in self.progress:
            call.event(progress)
        if request.image not in self.images:
            raise ImageNotFound(f"no image {request.image}")
        return m.EnvironmentInfo(name=request.image, version=1, digest="", size=1, created=1.0, reference=self.name)

    async def _environment_lock(self, call: Incoming, request: m.LockEnvironment) -> EnvironmentLock:
        if request.environment.base in (*self.lacks, "nothing"):
            raise EnvironmentNotFound(f"no environment {request.environment.base}")
        digest = "sha256:" + "0" * 64
        locked = [
            LockedImage(name=name, reference=name, digest=digest, layers=(digest,))
            for name in request.environment.names()
        ]
        return EnvironmentLock(base=locked[0], toolkits=tuple(locked[1:]))

    # commands

    async def _exec_start(self, call: Incoming, request: m.StartExec) -> ExecResult:
        commands = self.commands[request.sandbox]
        command = commands.get(request.id)
        if self.start_gate is not None:
            await self.start_gate.wait()
        if command is None:
            command = commands[request.id] = Command(request.id, request.exec)
            self._spawn(self._run(command))
        elif command.request != request.exec:
            raise Conflict("the id was used for another command", field="id")
        return await self._attached(call, command, request)

    async def _exec_attach(self, call: Incoming, request: m.AttachExec) -> ExecResult:
        command = self._command(request.sandbox, request.id)
        return await self._attached(call, command, request)

    def _command(self, sandbox: str, id_: str) -> Command:
        try:
            return self.commands[sandbox][id_]
        except KeyError:
            raise ExecNotFound(f"no command {id_}") from None

    async def _attached(self, call: Incoming, command: Command, request: m.StartExec | m.AttachExec) -> ExecResult:
        limits = {STDOUT: request.stdout_limit, STDERR: request.stderr_limit}
        credit = {STDOUT: asyncio.Event(), STDERR: asyncio.Event()}

        def on_frame(frame: Frame) -> None:
            if frame.type == FrameType.CREDIT:
                limits[frame.stream] = max(limits[frame.stream], decode_u64(frame.payload))
                credit[frame.stream].set()
            elif frame.type == FrameType.DATA:
                self._feed(call, command, frame)
            elif frame.type == FrameType.EOF:
                command.input_ended.set()
                command.input_changed.set()

        call.on_frame = on_frame
        if command.request.argv[-1] != b"missing" and self.tells_start:
            call.event(m.ExecStarted(id=command.id, pid=7, stdin_offset=len(command.input)))
        if command.request.stdin:
            call.credit(STDIN, len(command.input) + WINDOW)
        await asyncio.gather(
            self._send(call, command.outputs[STDOUT], STDOUT, request.stdout_offset, limits, credit[STDOUT]),
            self._send(call, command.outputs[STDERR], STDERR, request.stderr_offset, limits, credit[STDERR]),
        )
        await command.done.wait()
        assert command.result is not None
        return command.result

    def _feed(self, call: Incoming, command: Command, frame: Frame) -> None:
        offset, data = decode_data(frame.payload)
        have = len(command.input)
        assert offset <= have, f"gap in input: {offset} after {have}"
        command.input += data[have - offset :]
        command.input_changed.set()
        call.credit(STDIN, len(command.input) + WINDOW)

    async def _send(
        self, call: Incoming, output: Output, stream: int, at: int, limits: dict[int, int], credit: asyncio.Event
    ) -> None:
        while True:
            end = min(output.size, limits[stream], at + CHUNK)
            if at < end:
                data = output.slice(at, end)
                call.send_data(stream, at, data)
                at += len(data)
                if at % (1 << 22) < CHUNK:
                    await asyncio.sleep(0)
            elif output.ended and at >= output.size:
                call.send_eof(stream, output.size + output.dropped, output.dropped)
                return
            else:
                await _either(credit, output.changed)

    async def _run(self, command: Command) -> None:
        argv = [item.decode(errors="surrogateescape") for item in command.request.argv]
        words = argv[2].split() if argv[:2] == ["/bin/sh", "-c"] else argv
        out, err = command.outputs[STDOUT], command.outputs[STDERR]
        program: Callable[..., Awaitable[None]] = getattr(self, f"_run_{words[0]}")
        await program(command, out, err, *words[1:])

    async def _run_echo(self, command: Command, out: Output, err: Output, *words: str) -> None:
        out.write(" ".join(words).encode() + b"\n")
        command.finish("exited", 0)

    async def _run_args(self, command: Command, out: Output, err: Output, *words: str) -> None:
        out.write(blobs(command.request.argv))
        command.finish("exited", 0)

    async def _run_env(self, command: Command, out: Output, err: Output) -> None:
        out.write(b"".join(k + b"=" + v + b"\n" for k, v in sorted(command.request.env.items())))
        command.finish("exited", 0)

    async def _run_exit(self, command: Command, out: Output, err: Output, code: str) -> None:
        err.write(b"failing\n")
        command.finish("exited", int(code))

    async def _run_signal(self, command: Command, out: Output, err: Output, number: str) -> None:
        command.finish("signaled", 128 + int(number))

    async def _run_missing(self, command: Command, out: Output, err: Output) -> None:
        command.finish("not_found", 127)

    async def _run_cat(self, command: Command, out: Output, err: Output) -> None:
        copied = 0
        while True:
            command.input_changed.clear()
            out.write(bytes(command.input[copied:]))
            copied = len(command.input)
            if command.input_ended.is_set() or not command.request.stdin:
                break
            await command.input_changed.wait()
        command.finish("exited", 0)

    async def _run_hold(self, command: Command, out: Output, err: Output, name: str) -> None:
        out.write(b"before\n")
        await self.gate(name).wait()
        out.write(b"after\n")
        command.finish("exited", 0)

    async def _run_sleep(self, command: Command, out: Output, err: Output, *words: str) -> None:
        out.write(b"sleeping\n")

    async def _run_bytes(self, command: Command, out: Output, err: Output, size: str, stream: str = "1") -> None:
        output = (out, err)[int(stream) - 1]
        output.generated = int(size)
        output.changed.set()
        command.finish("exited", 0)

    async def _exec_signal(self, call: Incoming, request: m.SignalExec) -> None:
        command = self._command(request.sandbox, request.id)
        command.signals.append(request.signal)
        command.finish("signaled", 128 + request.signal)

    async def _exec_cancel(self, call: Incoming, request: m.CancelExec) -> None:
        self._command(request.sandbox, request.id).finish("cancelled")

    async def _exec_list(self, call: Incoming, request: m.ListExecs) -> list[ExecInfo]:
        return [
            ExecInfo(
                id=c.id,
                argv=c.request.argv,
                started=c.started,
                result=c.result,
                stdout_recorded=c.outputs[STDOUT].size,
                stderr_recorded=c.outputs[STDERR].size,
            )
            for c in self.commands[request.sandbox].values()
        ]

    async def _process_list(self, call: Incoming, request: m.ListProcesses) -> list[ProcessInfo]:
        return [ProcessInfo(pid=7, ppid=1, uid=0, state="S", rss=4096, argv=(b"sleep", b"1"))]

    # files

    async def _reply_bytes(self, call: Incoming, data: bytes, path: bytes = b"") -> None:
        size, fault = self.faults.get(path, (len(data), ""))
        await self._send_bytes(call, data[:size])
        if fault:
            raise scripted_error(fault)

    async def _send_bytes(self, call: Incoming, data: bytes) -> None:
        output = Output()
        output.data += data
        output.end()
        limits, credit = {STDOUT: 0, STDERR: 0}, asyncio.Event()

        def on_frame(frame: Frame) -> None:
            if frame.type == FrameType.CREDIT:
                limits[frame.stream] = max(limits[frame.stream], decode_u64(frame.payload))
                credit.set()

        call.on_frame = on_frame
        await self._send(call, output, STDOUT, 0, limits, credit)

    async def _take_bytes(self, call: Incoming) -> bytes:
        data, ended = bytearray(), asyncio.Event()

        def on_frame(frame: Frame) -> None:
            if frame.type == FrameType.DATA:
                offset, piece = decode_data(frame.payload)
                assert offset == len(data), "gap in input"
                data.extend(piece)
                call.credit(STDIN, len(data) + WINDOW)
            elif frame.type == FrameType.EOF:
                ended.set()

        call.on_frame = on_frame
        call.credit(STDIN, WINDOW)
        await ended.wait()
        return bytes(data)

    async def _file_read(self, call: Incoming, request: m.ReadFile) -> None:
        if request.path not in self.files:
            raise FileMissing(f"{request.path!r}: no such file")
        data = self.files[request.path][request.offset :]
        await self._reply_bytes(call, data if request.length is None else data[: request.length], request.path)

    async def _file_write(self, call: Incoming, request: m.WriteFile) -> None:
        if request.exclusive and request.path in self.files:
            raise FileAlreadyExists("exists")
        data = await self._take_bytes(call)
        self.files[request.path] = self.files.get(request.path, b"") + data if request.append else data
        if request.mode is not None:
            self.modes[request.path] = request.mode

    async def _file_stat(self, call: Incoming, request: m.StatFile) -> FileStat:
        if request.path not in self.files and request.path not in self.trees:
            raise FileMissing(f"{request.path!r}: no such file")
        return FileStat(
            path=request.path,
            kind="file" if request.path in self.files else "directory",
            size=len(self.files.get(request.path, b"")),
            mode=self.modes.get(request.path, 0o644),
            uid=0,
            gid=0,
            mtime_ns=0,
        )

    async def _file_list(self, call: Incoming, request: m.ListFiles) -> None:
        prefix = request.path.rstrip(b"/") + b"/"
        await self._reply_bytes(
            call,
            b"".join(
                encode_entry(Entry(path[len(prefix) :], "f", 0o644, 0, 0, 1, len(data), 0, b""))
                for path, data in sorted(self.files.items())
                if path.startswith(prefix)
            ),
            request.path,
        )

    async def _file_mkdir(self, call: Incoming, request: m.MakeDirectory) -> None:
        return None

    async def _file_remove(self, call: Incoming, request: m.RemoveFile) -> None:
        if self.files.pop(request.path, None) is None and not request.missing_ok:
            raise FileMissing("no such file")

    async def _file_rename(self, call: Incoming, request: m.RenameFile) -> None:
        self.files[request.target] = self.files.pop(request.path)

    async def _file_get_tree(self, call: Incoming, request: m.GetTree) -> None:
        if request.path not in self.trees:
            raise FileMissing("no such tree")
        await self._reply_bytes(call, self.trees[request.path], request.path)

    async def _file_put_tree(self, call: Incoming, request: m.PutTree) -> None:
        data = await self._take_bytes(call)
        self.trees[request.path] = data
        self.received.extend(read_tree(data))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def read_tree(data: bytes) -> list[tuple[Entry, bytes]]:
    cursor, found = Cursor(data), []
    while cursor.left:
        entry, content = read_entry(cursor), b""
        while entry.kind == "f" and (piece := cursor.blob()):
            content += piece
        found.append((entry, content))
    return found


def scripted_error(code: str) -> BarchanError:
    cls = next(c for c in tree() if c.code == code)
    return cls(f"scripted {code}", hint="a hint", phase="mount", field="a.field")


async def _either(*events: asyncio.Event) -> None:
    for event in events:
        event.clear()
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
