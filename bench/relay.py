"""The least that our path could cost: a bare chain of processes with the same hops, which does nothing but pass bytes on.

client → api → node → guest over unix sockets. The node stage writes to a file what a recorder would and calls
fdatasync. Blocking sockets, no framing, no checks: a bound to compare with, not something to use.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

REQUEST = 128
"""Bytes of one call and of its answer."""
CHUNK = 256 * 1024
Stage = Callable[..., None]
_fork = get_context("fork")


def echo(below: socket.socket) -> None:
    """The guest of the call chain."""
    while request := below.recv(REQUEST, socket.MSG_WAITALL):
        below.sendall(request)


def forward(above: socket.socket, below: socket.socket) -> None:
    while request := below.recv(REQUEST, socket.MSG_WAITALL):
        above.sendall(request)
        below.sendall(above.recv(REQUEST, socket.MSG_WAITALL))


def forward_durably(above: socket.socket, below: socket.socket, path: Path) -> None:
    """The node of the call chain: the answer is on disk before it goes on."""
    with path.open("wb", buffering=0) as file:
        while request := below.recv(REQUEST, socket.MSG_WAITALL):
            above.sendall(request)
            answer = above.recv(REQUEST, socket.MSG_WAITALL)
            file.write(answer)
            os.fdatasync(file.fileno())
            below.sendall(answer)


def pour(below: socket.socket, size: int) -> None:
    """The guest of the stream chain: `size` bytes each time it is asked."""
    block = memoryview(bytes(CHUNK))
    while below.recv(1):
        left = size
        while left:
            left -= below.send(block[: min(left, CHUNK)])


def stream(above: socket.socket, below: socket.socket, size: int, path: Path | None) -> None:
    """Pass one stream on; with a path, append it there and sync it once."""
    buffer = memoryview(bytearray(CHUNK))
    while asked := below.recv(1):
        above.sendall(asked)
        fd = os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        left = size
        while left:
            count = above.recv_into(buffer)
            if path:
                os.write(fd, buffer[:count])
            if path and left == count:
                os.fdatasync(fd)
            below.sendall(buffer[:count])
            left -= count
        os.close(fd)


@contextmanager
def chain(*stages: tuple[Stage, tuple[object, ...]]) -> Iterator[socket.socket]:
    """Processes joined by socket pairs, the innermost first. Yields the client's socket."""
    pairs = [socket.socketpair() for _ in stages]
    processes = []
    for i, (stage, extra) in enumerate(stages):
        above = (pairs[i - 1][0],) if i else ()
        keep = {*above, pairs[i][1]}
        processes.append(_fork.Process(target=_run, args=(stage, (*above, pairs[i][1], *extra), pairs, keep)))
    for process in processes:
        process.start()
    client = pairs[-1][0]
    for near, far in pairs:
        far.close()
        if near is not client:
            near.close()
    try:
        yield client
    finally:
        client.close()
        for process in processes:
            process.join(10)


def _run(
    stage: Stage,
    arguments: tuple[object, ...],
    pairs: list[tuple[socket.socket, socket.socket]],
    keep: set[socket.socket],
) -> None:
    for pair in pairs:
        for end in pair:
            if end not in keep:
                end.close()
    stage(*arguments)


@contextmanager
def call_chain(directory: Path) -> Iterator[Callable[[], float]]:
    """A function that makes one durable call through the chain and returns its milliseconds."""
    with chain((echo, ()), (forward_durably, (directory / "relay.log",)), (forward, ())) as client:
        request = bytes(REQUEST)

        def call() -> float:
            started = time.perf_counter()
            client.sendall(request)
            client.recv(REQUEST, socket.MSG_WAITALL)
            return (time.perf_counter() - started) * 1e3

        yield call


@contextmanager
def stream_chain(directory: Path, size: int) -> Iterator[Callable[[], float]]:
    """A function that pulls `size` recorded bytes through the chain and returns the seconds."""
    with chain((pour, (size,)), (stream, (size, directory / "relay.out")), (stream, (size, None))) as client:
        buffer = memoryview(bytearray(CHUNK))

        def pull() -> float:
            started = time.perf_counter()
            client.sendall(b"x")
            left = size
            while left:
                left -= client.recv_into(buffer)
            return time.perf_counter() - started

        yield pull
