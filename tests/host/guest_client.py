"""Drives the real guest binary over its socket, blocking, for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from barchan.wire import guest as wire
from barchan.wire.frames import (
    CHUNK,
    Frame,
    FrameReader,
    FrameType,
    decode_data,
    decode_eof,
    decode_u64,
    encode,
    encode_credit,
    encode_data,
    encode_eof,
)
from barchan.wire.guest import Done, OpKind, Welcome

CGROUPS = Path("/sys/fs/cgroup/unified" if Path("/sys/fs/cgroup/unified").is_dir() else "/sys/fs/cgroup")
NATIVE = Path(__file__).resolve().parents[2] / "native"
GENEROUS = 1 << 62
WAIT = 20.0
"""Seconds after which a test that waits for the guest fails."""


class Hangup(Exception):
    """The guest ended the connection."""


class Result:
    def __init__(self) -> None:
        self.out = {1: bytearray(), 2: bytearray()}
        self.eof: dict[int, tuple[int, int]] = {}
        self.started: int | None = None
        self.done: Done | None = None
        self.refused: tuple[int, bytes] | None = None
        self.input_limit = 256 << 10

    @property
    def stdout(self) -> bytes:
        return bytes(self.out[1])

    @property
    def stderr(self) -> bytes:
        return bytes(self.out[2])


class Link:
    """One connection. `acks` and `credit` say how it treats output; offsets are checked for gaps and repetition."""

    def __init__(
        self, path: str, *, acks: bool = True, credit: int = GENEROUS, results: dict[int, Result] | None = None
    ):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT)
        self.sock.connect(path)
        self.reader = FrameReader()
        self.acks, self.credit = acks, credit
        self.results: dict[int, Result] = {} if results is None else results
        self.queue: list[Frame] = []
        self.pongs: list[bytes] = []

    def hello(self) -> Welcome:
        self.send(wire.hello())
        frame = self.next_frame()
        assert frame.type == FrameType.WELCOME
        return wire.decode_welcome(frame.payload)

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Hangup from error

    def next_frame(self) -> Frame:
        while not self.queue:
            try:
                data = self.sock.recv(1 << 18)
            except ConnectionResetError as error:
                raise Hangup from error
            if not data:
                raise Hangup
            self.queue.extend(self.reader.feed(data))
        return self.queue.pop(0)

    def start(self, op: int, kind: OpKind, *parts: bytes, user: bytes = b"") -> Result:
        result = self.results.setdefault(op, Result())
        self.send(wire.start(op, kind, user, *parts) + self.credits(op))
        return result

    def credits(self, op: int) -> bytes:
        if not self.credit:
            return b""
        return encode_credit(op, 1, self.credit) + encode_credit(op, 2, self.credit)

    def step(self) -> Frame:
        frame = self.next_frame()
        if frame.type == FrameType.PONG:
            self.pongs.append(frame.payload)
            return frame
        result = self.results.setdefault(frame.id, Result())
        if frame.type == FrameType.DATA:
            offset, data = decode_data(frame.payload)
            kept = result.out[frame.stream]
            assert offset <= len(kept), f"gap: {offset} after {len(kept)}"
            again = kept[offset : offset + len(data)]
            assert data[: len(again)] == again, f"{offset}: other bytes than before"
            kept += data[len(again) :]
            if self.acks:
                self.send(encode(FrameType.ACK, frame.id, struct.pack("<Q", len(kept)), frame.stream))
        elif frame.type == FrameType.EOF:
            result.eof[frame.stream] = decode_eof(frame.payload)
        elif frame.type == FrameType.STARTED:
            (result.started,) = struct.unpack("<I", frame.payload)
        elif frame.type == FrameType.DONE:
            result.done = wire.decode_done(frame.payload)
        elif frame.type == FrameType.REFUSED:
            result.refused = wire.decode_refused(frame.payload)
        elif frame.type == FrameType.CREDIT:
            result.input_limit = decode_u64(frame.payload)
        else:
            raise AssertionError(f"unexpected frame {frame}")
        return frame

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT
        while not condition():
            assert time.monotonic() < end, "the guest did not get there in time"
            self.step()

    def wait(self, op: int) -> Done:
        result = self.results[op]
        self.until(lambda: result.done or result.refused)
        assert result.refused is None, result.refused
        assert result.done is not None
        return result.done

    def feed(self, op: int, data: bytes, *, eof: bool = True) -> None:
        """Sends all of `data` as credit comes, then end of file."""
        result, at = self.results[op], 0
        while at < len(data):
            if at == result.input_limit:
                self.step()
                continue
            piece = data[at : min(at + CHUNK, result.input_limit)]
            self.send(encode_data(op, 0, at, piece))
            at += len(piece)
        if eof:
            self.send(encode_eof(op, 0, len(data)))

    def ping(self) -> None:
        token = secrets.token_bytes(8)
        self.send(encode(FrameType.PING, 0, token))
        self.until(lambda: token in self.pongs)

    def forget(self, op: int) -> None:
        self.send(encode(FrameType.FORGET, op))

    def close(self) -> None:
        self.sock.close()


def exec_parts(
    *argv: str | bytes,
    flags: int = 0,
    timeout_ms: int = 0,
    grace_ms: int = 0,
    limit: int = 1 << 40,
    nofile: int = 0,
    cwd: bytes = b"",
    env: list[bytes] | None = None,
    rows: int = 0,
    columns: int = 0,
) -> bytes:
    return wire.exec_parts(
        flags=flags,
        timeout_ms=timeout_ms,
        grace_ms=grace_ms,
        output_limit=limit,
        nofile=nofile,
        cwd=cwd,
        argv=tuple(a.encode() if isinstance(a, str) else a for a in argv),
        env=[b"PATH=/usr/bin:/bin"] if env is None else env,
        rows=rows,
        columns=columns,
    )


def built_guest(directory: Path) -> Path:
    """$BARCHAN_GUEST, or the guest compiled into `directory` from this tree."""
    if given := os.environ.get("BARCHAN_GUEST"):
        return Path(given)
    subprocess.run(["make", "-s", "-C", NATIVE, f"BUILD={directory}", f"{directory}/guest"], check=True, timeout=120)
    return directory / "guest"


class Guest:
    """The guest as an ordinary root process, with a cgroup v2 directory of its own when `grouped`."""

    def __init__(self, binary: Path, directory: Path, *, grouped: bool = True) -> None:
        self.path = str(directory / "socket")
        self.group = CGROUPS / f"barchan-test-{os.getpid()}-{secrets.token_hex(3)}" if grouped else None
        self.pid = self._spawn(binary)
        self.last = 0

    def _spawn(self, binary: Path) -> int:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(self.path)
            listener.listen(4)
            null = os.open("/dev/null", os.O_RDWR)
            stack.callback(os.close, null)
            actions = [(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1)]
            actions.append((os.POSIX_SPAWN_DUP2, self._high(stack, listener.fileno()), 3))
            if self.group:
                self.group.mkdir()
                directory = os.open(self.group, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, directory)
                actions.append((os.POSIX_SPAWN_DUP2, self._high(stack, directory), 4))
            else:
                actions.append((os.POSIX_SPAWN_DUP2, null, 4))
            pid = self._launch(binary, actions)
        if self.group:
            (self.group / "cgroup.procs").write_text(str(pid))
        return pid

    def _launch(self, binary: Path, actions: list[tuple[int, int, int]]) -> int:
        return os.posix_spawn(binary, ["init"], {}, file_actions=actions)

    @staticmethod
    def _high(stack: contextlib.ExitStack, fd: int) -> int:
        copy = os.dup2(fd, 60 + fd)
        stack.callback(os.close, copy)
        return copy

    def next_op(self) -> int:
        self.last += 1
        return self.last

    @contextlib.contextmanager
    def dial(self, **options: object) -> Iterator[Link]:
        link = Link(self.path, **options)  # type: ignore[arg-type]
        try:
            link.hello()
            yield link
        finally:
            link.close()

    def pids(self) -> dict[str, list[int]]:
        """Every process of the guest's groups, by group name."""
        assert self.group
        found = {}
        for group in self.group.glob("x*"):
            with contextlib.suppress(OSError):  # it may be removed at any moment
                found[group.name] = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        return found

    def memory_kib(self) -> int:
        for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
        raise AssertionError("no Pss")

    def stop(self) -> None:
        if self.group:
            (self.group / "cgroup.kill").write_text("1")
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        if self.group:
            self._remove_groups(self.group)

    @staticmethod
    def _remove_groups(group: Path) -> None:
        end = time.monotonic() + WAIT
        for child in [*group.glob("x*"), group]:
            while "populated 1" in (child / "cgroup.events").read_text():
                assert time.monotonic() < end, f"{child} does not become empty"
                time.sleep(0.01)
            child.rmdir()


@contextlib.contextmanager
def running_guest(binary: Path, *, grouped: bool = True, kind: type[Guest] = Guest) -> Iterator[Guest]:
    with tempfile.TemporaryDirectory(prefix="guest-") as directory:
        guest = kind(binary, Path(directory), grouped=grouped)
        try:
            yield guest
        finally:
            guest.stop()
