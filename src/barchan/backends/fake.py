"""A scripted backend: real frames, real connections, no kernel. For tests of everything above a backend.

A `FakeWorld` is the host: it outlives the backend object as a host outlives its agent. Programs are `true`, `false`,
`exit N`, `echo WORDS…`, `cat`, `sleep SECONDS`, `flood BYTES`, `stty size`, `winch N` (says the next N sizes of its terminal);
in a shell session also `cd DIR` and `pwd`. Labels of the spec script what goes wrong:

    fake.create = fail:PHASE     creation fails in that phase
    fake.create = hang           creation does not end until the sandbox is destroyed
    fake.guest  = rude           the guest breaks the protocol at the first command
    fake.pack   = fail:PHASE     packing fails in that phase
    fake.pack   = hang           packing does not end until the sandbox is destroyed
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import socket
import struct
from collections.abc import Callable
from typing import cast

from barchan.backends.base import Abilities, Launch, Pack, Running, Space, Usage, Used
from barchan.backends.fake_commands import Command, Line, Session
from barchan.environments import PullProgress, Told, untold
from barchan.errors import (
    CreateFailed,
    EnvironmentNotFound,
    ImageNotFound,
    InvalidRequest,
    NotSupported,
    SandboxUnavailable,
)
from barchan.image_refs import is_image
from barchan.images import NO_CONFIG, renamed, settled
from barchan.locks import EnvironmentLock, LockedImage
from barchan.packing import PackedLayer
from barchan.pools import PoolInfo
from barchan.spec import GIB, MIB, EnvironmentRef, SandboxId, SandboxSpec
from barchan.wire.frames import (
    STDERR,
    STDIN,
    STDOUT,
    Frame,
    FrameReader,
    FrameType,
    Payload,
    decode_data,
    decode_u64,
    encode,
    encode_credit,
    encode_data,
    encode_eof,
)
from barchan.wire.guest import INPUT_WINDOW, Cursor, ExecFlag, OpKind, Refusal, blob
from barchan.wire.messages import EnvironmentInfo

_EXEC_HEAD = struct.Struct("<IIIQIHH")
_RUN_HEAD = struct.Struct("<QIIQ")


class FakeGuest:
    """The far side of the guest protocol. One connection at a time."""

    def __init__(self, *, rude: bool = False) -> None:
        self.last = 0
        self.ops: dict[int, Command] = {}
        self._rude = rude
        self._connection: _GuestSide | None = None

    def attach(self, connection: _GuestSide) -> None:
        if self._connection is not None:
            self._connection.hang_up()
        self._connection = connection
        for op in self.ops.values():
            for stream in op.streams.values():
                stream.sent, stream.limit, stream.eof_sent = stream.acknowledged, 0, False

    def hang_up(self) -> None:
        """As a guest whose connection breaks while it lives on."""
        if self._connection is not None:
            self._connection.hang_up()
            self._connection = None

    def kill(self) -> None:
        """As a guest that died."""
        for op in self.ops.values():
            op.task.cancel()
        self.ops.clear()
        self.hang_up()

    def take(self, frame: Frame) -> None:
        if frame.type == FrameType.HELLO:
            self._send(self._welcome())
        elif frame.type == FrameType.PING:
            self._send(encode(FrameType.PONG, frame.id, frame.payload))
        elif frame.type == FrameType.START:
            self._start(frame)
        elif (op := self.ops.get(frame.id)) is not None:
            self._for_op(op, frame)

    def _welcome(self) -> bytes:
        known = b"".join(
            struct.pack("<QBBHIQQQQ", op.id, op.kind, op.done is not None, 0, 7, op.taken,
                        op.streams[STDOUT].acknowledged, op.streams[STDERR].acknowledged, 0)
            for op in self.ops.values()
        )  # fmt: skip
        return encode(FrameType.WELCOME, 0, struct.pack("<HHIQQ", 1, 0, len(self.ops), 1, self.last) + known)

    def _start(self, frame: Frame) -> None:
        if self._rude:
            self._send(encode(0x3F, frame.id))
            return
        if frame.id <= self.last:
            self._send(encode(FrameType.REFUSED, frame.id, struct.pack("<I", Refusal.KNOWN) + blob(b"known id")))
            return
        self.last = frame.id
        cursor = Cursor(frame.payload)
        (kind, *_) = cursor.fixed(struct.Struct("<B3x"))
        cursor.blob()
        if kind not in (OpKind.EXEC, OpKind.RUN):
            self._send(encode(FrameType.REFUSED, frame.id, struct.pack("<I", Refusal.BAD) + blob(b"only commands")))
            return
        self.ops[frame.id] = self._line(frame.id, cursor) if kind == OpKind.RUN else self._command(frame.id, cursor)
        self._send(encode(FrameType.STARTED, frame.id, struct.pack("<I", 7)))

    def _command(self, id: int, cursor: Cursor) -> Command:
        flags, *_, rows, columns = cursor.fixed(_EXEC_HEAD)
        cursor.blob()
        argv = cursor.blobs()
        return Session(self.pump, id) if flags & ExecFlag.SHELL else Command(self.pump, id, argv, (rows, columns))

    def _line(self, id: int, cursor: Cursor) -> Command:
        session, *_ = cursor.fixed(_RUN_HEAD)
        return Line(self.pump, id, self.ops.get(session), cursor.blob())

    def _for_op(self, op: Command, frame: Frame) -> None:
        if frame.type == FrameType.DATA:
            self._input(op, *decode_data(frame.payload))
        elif frame.type == FrameType.EOF:
            op.input.put_nowait(None)
        elif frame.type == FrameType.CREDIT:
            stream = op.streams[frame.stream]
            stream.limit = max(stream.limit, decode_u64(frame.payload))
            self.pump(op)
        elif frame.type == FrameType.ACK:
            stream = op.streams[frame.stream]
            stream.acknowledged = max(stream.acknowledged, decode_u64(frame.payload))
        elif frame.type == FrameType.FORGET:
            self.ops.pop(op.id)
        elif frame.type == FrameType.RESIZE:
            rows, columns = struct.unpack("<HH", frame.payload)
            op.resize((rows, columns))
        elif frame.type in (FrameType.CANCEL, FrameType.SIGNAL):
            op.task.cancel()

    def _input(self, op: Command, offset: int, data: Payload) -> None:
        fresh = data[op.taken - offset :]
        op.taken += len(fresh)
        op.input.put_nowait(bytes(fresh))
        self._send(encode_credit(op.id, STDIN, op.taken + INPUT_WINDOW))

    def pump(self, op: Command) -> None:
        """Send what credit allows, then ends, then the result."""
        if self._connection is None:
            return
        for number, stream in op.streams.items():
            piece = bytes(stream.data[stream.sent : stream.limit])
            if piece:
                self._send(encode_data(op.id, number, stream.sent, piece))
                stream.sent += len(piece)
            if stream.ended and stream.sent == len(stream.data) and not stream.eof_sent:
                stream.eof_sent = True
                self._send(encode_eof(op.id, number, len(stream.data)))
        if op.done is not None and all(stream.eof_sent for stream in op.streams.values()):
            outcome, code, detail = op.done
            self._send(encode(FrameType.DONE, op.id, struct.pack("<B3xiQQQQI", outcome, code, *[0] * 5) + blob(detail)))

    def _send(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.send(data)


class _GuestSide(asyncio.Protocol):
    def __init__(self, guest: FakeGuest) -> None:
        self._guest = guest
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._guest.attach(self)

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            self._guest.take(frame)

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


VERSION = "@1"
"""Of every environment there is."""


class FakeWorld:
    """What exists on the fake host."""

    def __init__(self, environments: tuple[str, ...] = ("tiny",)) -> None:
        self.environments = environments
        self.registry: dict[str, asyncio.Event] = {}
        """Images that can be fetched, each with what that waits for."""
        self.config = NO_CONFIG
        """What each of them says about programs."""
        self.guests: dict[str, FakeGuest] = {}
        self.pids: dict[str, int] = {}
        self.half_made: set[str] = set()
        self.usage: dict[str, Usage] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.packed: dict[tuple[str, str], PackedLayer] = {}
        """By sandbox and key."""
        self._next = itertools.count(1000)

    def pid(self) -> int:
        return next(self._next)


class FakeBackend:
    """See `base.Backend`."""

    def __init__(self, world: FakeWorld, *, stats: bool = True, pack: bool = True) -> None:
        notes = ("scripted: nothing really runs",)
        self.abilities = Abilities(backend="container", notes=notes, stats=stats, pack=pack)
        self.world = world
        self._watchers: dict[str, Callable[[str], None]] = {}
        self._hanging: dict[str, asyncio.Event] = {}

    async def environments(self) -> tuple[EnvironmentInfo, ...]:
        return tuple(EnvironmentInfo(name=n, version=1, digest="", size=0, created=0) for n in self.world.environments)

    async def pull(self, image: str, told: Told = untold, *, again: bool = False) -> EnvironmentInfo:
        """Told half of it, then it waits until the test lets it go on."""
        if (gate := self.world.registry.get(image)) is None:
            raise ImageNotFound(f"no image {image}")
        told(PullProgress(image=image, phase="pull", layer=1, layers=2, done=5, total=10))
        await gate.wait()
        self.world.environments += (image,)
        return EnvironmentInfo(name=image, version=1, digest="", size=10, created=0, reference=image)

    async def settle(self, spec: SandboxSpec, told: Told = untold) -> SandboxSpec:
        for name in spec.environment.names():
            if is_image(name) and name.removesuffix(VERSION) not in self.world.environments:
                await self.pull(name, told)
        for name in spec.environment.names():
            if name.removesuffix(VERSION) not in self.world.environments:
                raise EnvironmentNotFound(f"no environment {name}", field="environment")
        if spec.mounts:
            raise InvalidRequest("mounts: the fake has no data mounts", field="mounts.source")
        if spec.ptrace:
            raise NotSupported("the fake has nothing to trace", field="ptrace")
        names = [name.removesuffix(VERSION) + VERSION for name in spec.environment.names()]
        return settled(spec, renamed(spec.environment, names), self.world.config)

    async def lock(self, environment: EnvironmentRef) -> EnvironmentLock:
        base, *above = (self._locked(name) for name in environment.names())
        workspace = above.pop(0) if environment.workspace else None
        return EnvironmentLock(base=base, workspace=workspace, toolkits=tuple(above))

    def _locked(self, name: str) -> LockedImage:
        plain = name.removesuffix(VERSION)
        if plain not in self.world.environments:
            raise EnvironmentNotFound(f"no environment {name}", field="environment")
        digest = "sha256:" + hashlib.sha256(plain.encode()).hexdigest()
        return LockedImage(name=name, reference=plain + VERSION, digest=digest, layers=(digest,))

    def take(self, launch: Launch) -> Running | None:
        return None

    async def tidy(self) -> None:
        """There is nothing."""

    async def create(self, launch: Launch) -> Running:
        await self.settle(launch.spec)
        script = launch.spec.labels.get("fake.create", "")
        self.world.half_made.add(launch.id)
        try:
            if script == "hang":
                await self._hanging.setdefault(launch.id, asyncio.Event()).wait()
                raise CreateFailed("destroyed while it was being made", phase="hang")
            if script.startswith("fail:"):
                raise CreateFailed("as scripted", phase=script.removeprefix("fail:"))
            self.world.guests[launch.id] = FakeGuest(rude=launch.spec.labels.get("fake.guest") == "rude")
            self.world.pids[launch.id] = self.world.pid()
            self.world.labels[launch.id] = launch.spec.labels
        finally:
            self.world.half_made.discard(launch.id)
        return Running(pid=self.world.pids[launch.id], pid_start=1)

    async def adopt(self, id: str, running: Running) -> bool:
        return self.world.pids.get(id) == running.pid and running.pid_start == 1

    async def connect(self, id: str, factory: Callable[[], asyncio.BufferedProtocol]) -> asyncio.Transport:
        guest = self.world.guests.get(id)
        if guest is None:
            raise ConnectionRefusedError(f"no guest {id}")
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: _GuestSide(guest), theirs)
        transport, _ = await loop.create_connection(factory, sock=ours)
        return transport

    def watch(self, id: str, gone: Callable[[str], None]) -> None:
        self._watchers[id] = gone

    def kill(self, id: str) -> None:
        """For tests: its first process dies."""
        self.world.guests.pop(id).kill()
        self.world.pids.pop(id)
        if (gone := self._watchers.pop(id, None)) is not None:
            gone("its first process ended")

    def usage(self, id: str) -> Usage:
        return self.world.usage.get(id, Usage(0, 0))

    async def measure(self, id: str) -> Used:
        if id not in self.world.guests:
            raise SandboxUnavailable(f"sandbox {id} ended while it was measured")
        return Used(MIB, 2 * MIB, 0.25, 0.5, 3, 1, 4 * MIB, *self.usage(id))

    async def pack(self, request: Pack) -> PackedLayer:
        world, id, name = self.world, request.id, request.order.name
        script = world.labels.get(id, {}).get("fake.pack", "")
        if script == "hang":
            await self._hanging.setdefault(id, asyncio.Event()).wait()
        if id not in world.guests:
            raise SandboxUnavailable(f"sandbox {id} has ended")
        if script.startswith("fail:"):
            raise CreateFailed("as scripted", phase=script.removeprefix("fail:"))
        if name not in world.environments:
            world.environments += (name,)
        layer, whole = (f"sha256:{hashlib.sha256((part + name).encode()).hexdigest()}" for part in ("", "whole "))
        made = world.packed[id, request.key] = PackedLayer(
            name=name,
            version=1,
            reference=name + VERSION,
            digest=whole if request.order.whole else layer,
            layer=layer,
            layers=len(request.spec.environment.names()) + 1 if request.order.whole else 1,
            sandbox=SandboxId(id),
            size=4096,
        )
        return made

    async def packed(self, request: Pack) -> PackedLayer | None:
        return self.world.packed.get((request.id, request.key))

    def space(self) -> Space:
        return Space(64 * GIB, 32 * GIB)

    def disk_full(self, id: str) -> bool:
        return False

    async def destroy(self, id: str) -> None:
        self._watchers.pop(id, None)
        if (waiting := self._hanging.pop(id, None)) is not None:
            waiting.set()
        if (guest := self.world.guests.pop(id, None)) is not None:
            guest.kill()
        self.world.pids.pop(id, None)
        self.world.half_made.discard(id)

    def pool(self) -> PoolInfo:
        return PoolInfo()

    async def leftovers(self) -> frozenset[str]:
        return frozenset(self.world.guests) | self.world.half_made

    async def close(self) -> None:
        for guest in self.world.guests.values():
            guest.hang_up()
        self._watchers.clear()
