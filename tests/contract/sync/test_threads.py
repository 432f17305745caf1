"""What only the synchronous client has: threads, interrupts, and code of the caller's that runs in between."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from websockets.http11 import Request
from websockets.server import ServerProtocol

from barchan.sdk._sync import _compat, _socket
from barchan.sdk._sync._futures import start, with_baton
from barchan.sync import ApiUnavailable, Client, InvalidRequest, RequestTimeout, Sandbox
from barchan.wire import messages as m
from tests.contract.test_api_process import make_certificate
from tests.rig_sync import TOKEN, Cancelled, Remote, Site, beside, finished, pause, site, together, within

ROUNDS = 20


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as it:
        yield it


@pytest.fixture
def node(place: Site) -> Iterator[Remote]:
    with place.node() as it:
        yield it


@pytest.fixture
def client(place: Site, node: Remote) -> Iterator[Client]:
    with place.client() as it:
        yield it


@pytest.fixture
def sandbox(client: Client) -> Sandbox:
    return client.create("debian-12")


def in_threads(*works: Any) -> None:
    """Plain threads, as callers have them. Raises what one of them raised."""
    failed: list[BaseException] = []

    def run(work: Any) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


# threads


def test_many_threads_share_clients(place: Site, node: Remote, sandbox: Sandbox) -> None:
    def runs(box: Sandbox, number: int) -> None:
        for i in range(ROUNDS):
            assert box.run(f"echo {number} {i}").text == f"{number} {i}\n"

    with place.client() as second:
        other = second.get(sandbox.id)
        in_threads(*(partial(runs, (sandbox, other)[number % 4 == 0], number) for number in range(20)))
    assert len(node.commands[sandbox.id]) == 20 * ROUNDS


def test_threads_wait_for_one_process(sandbox: Sandbox, node: Remote) -> None:
    process = sandbox.start("hold gate")
    waiting = [beside(process.wait) for _ in range(5)]
    node.release("gate")
    assert {one.wait().exit_code for one in waiting} == {0}
    assert process.stdout.read_all() == b"before\nafter\n"


def test_no_thread_is_left_behind(place: Site, node: Remote) -> None:
    before = set(threading.enumerate())
    with place.client() as client:
        box = client.create("debian-12")
        box.run(["cat"], stdin=b"x")
        box.start("sleep")
        with within(5):
            while len(set(threading.enumerate()) - before) != 2:  # one reads, one follows the process
                pause()
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(5)
    assert not any(thread.is_alive() for thread in left)


# TLS


def test_over_tls(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    for name in (".", "key"):
        (tmp_path / name).chmod(0o700)
    with site(tmp_path, tls_cert=tmp_path / "cert", tls_key=tmp_path / "key") as place, place.node():
        with Client(place.url, TOKEN) as client, pytest.raises(InvalidRequest, match="not trusted"):
            client.list()
        with Client(place.url, TOKEN, ca=tmp_path / "cert") as client:
            box, data = client.create("debian-12"), os.urandom(5_000_000)
            together(*(partial(box.run, f"echo {i}") for i in range(20)))
            assert box.run(["cat"], stdin=data).stdout == data
            assert sum(map(len, box.start("bytes 20000000").stdout)) == 20_000_000


# an API that went silent


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[str]:
    """Where something opens WebSockets and from then on neither reads nor writes."""
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                kept.append(listening.accept()[0])
            except OSError:
                return
            protocol = ServerProtocol()
            protocol.receive_data(kept[-1].recv(1 << 16))
            (request,) = protocol.events_received()
            assert isinstance(request, Request)
            protocol.send_response(protocol.accept(request))
            kept[-1].sendall(b"".join(protocol.data_to_send()))

    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"unix:{path}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
    for one in kept:
        one.close()


def test_an_api_that_answers_no_ping_is_lost(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_socket, "_HEARTBEAT", struct.pack("ll", 0, 100_000))
    with Client(silent, reconnect=0.0) as client, pytest.raises(ApiUnavailable, match="was lost"):
        client.list()


def test_an_api_that_reads_nothing_is_lost_and_holds_nobody_up(silent: str) -> None:
    with Client(silent, timeout=0.1, reconnect=0.0) as client:
        with pytest.raises(RequestTimeout):
            client.list()
        link = with_baton(client._connection.link)
        for _ in range(70):
            with_baton(link.send, bytes(1 << 20))
        assert isinstance(link.lost, ApiUnavailable) and "unread" in link.lost.message


def test_an_api_that_reads_nothing_does_not_hold_the_end(silent: str) -> None:
    client = Client(silent, timeout=0.1, reconnect=0.0)
    with pytest.raises(RequestTimeout):
        client.list()
    with_baton(with_baton(client._connection.link).send, bytes(3 << 20))
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 2 * _socket.CLOSE_WAIT


# code of the caller's


def test_input_may_use_the_client(sandbox: Sandbox) -> None:
    def pieces() -> Iterator[bytes]:
        for i in range(3):
            yield sandbox.run(f"echo {i}").stdout

    assert sandbox.run(["cat"], stdin=pieces()).stdout == b"0\n1\n2\n"
    assert sandbox.run(["cat"], stdin=[b"a", b"b"]).stdout == b"ab"
    with pytest.raises(InvalidRequest) as caught:
        sandbox.run(["cat"], stdin=[1])  # type: ignore[list-item]
    assert caught.value.field == "stdin"


def test_input_that_waits_holds_nobody_up(sandbox: Sandbox) -> None:
    go = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b"a"
        assert go.wait(20)
        yield b"b"

    running = beside(sandbox.run, ["cat"], stdin=pieces())
    assert sandbox.run("echo meanwhile").ok
    go.set()
    assert running.wait().stdout == b"ab"


def test_progress_may_use_the_client(sandbox: Sandbox) -> None:
    seen = []

    def progress(done: int, total: int | None) -> None:
        seen.append((done, sandbox.run("echo on").text))

    sandbox.files.write("/a", bytes(300_000), progress=progress)
    assert seen[-1] == (300_000, "on\n")


def test_a_stream_left_early_is_given_up(client: Client, sandbox: Sandbox) -> None:
    sandbox.files.write("/a", bytes(5_000_000))
    for chunk in sandbox.files.read_stream("/a"):
        assert chunk
        break
    link = with_baton(client._connection.link)
    assert not link._calls


# many


def test_many_sandboxes_by_a_plain_loop(client: Client, node: Remote) -> None:
    with client.create_many(40, "debian-12") as batch:
        found = [sandbox.id for sandbox in batch]
    assert len(set(found)) == 40 == len(node.sandboxes)
    with client.create_many(5, "debian-12") as batch:
        assert len(batch.all()) == 5


# interrupts

INTERRUPTED = """
import sys
from barchan.sync import Client

with Client(data=sys.argv[1]) as client:
    client.get(sys.argv[2]).run("sleep", id="s")
"""


def test_an_interrupt_cancels_the_command(place: Site, sandbox: Sandbox, node: Remote) -> None:
    argv = [sys.executable, "-c", INTERRUPTED, str(place.data), sandbox.id]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as program:
        node.wait_for(m.StartExec)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=20)
    assert program.returncode == -signal.SIGINT and said.rstrip().endswith(b"KeyboardInterrupt")
    assert finished(node, sandbox.id, "s").outcome == "cancelled"


class InterruptedOnce:
    """A socket whose first `send` is interrupted as soon as the kernel has the bytes and the node what they ask for."""

    def __init__(self, sock: socket.socket, node: Remote) -> None:
        self._sock = sock
        self._node = node
        self._done = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def send(self, data: memoryview, flags: int) -> int:
        sent = self._sock.send(data, flags)
        if not self._done:
            self._done = True
            self._node.wait_for(m.StartExec)
            raise KeyboardInterrupt
        return sent


def test_an_interrupt_while_the_command_is_sent_cancels_it(place: Site, sandbox: Sandbox, node: Remote) -> None:
    with pytest.raises(KeyboardInterrupt), place.client() as client:
        again = client.get(sandbox.id)
        connected: Any = client._connection._socket
        connected._sock = InterruptedOnce(connected._sock, node)
        again.run("sleep", id="s")
    assert finished(node, sandbox.id, "s").outcome == "cancelled"


OFTEN_INTERRUPTED = """
import random, signal, sys
from barchan.sync import Client

hits = 0
signal.signal(signal.SIGALRM, signal.default_int_handler)
with Client(data=sys.argv[1]) as client:
    box = client.get(sys.argv[2])
    for i in range(300):
        try:
            try:
                # Once more a second later: Python throws away one that comes in a destructor.
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.003), 1.0)
                while True:
                    box.run(f"echo {i}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            hits += 1
        assert box.run("echo alive").text == "alive\\n"
print(hits)
"""


def test_interrupts_at_any_point_leave_a_client_that_works(place: Site, sandbox: Sandbox) -> None:
    argv = [sys.executable, "-c", OFTEN_INTERRUPTED, str(place.data), sandbox.id]
    done = subprocess.run(argv, capture_output=True, timeout=110, check=False)
    assert (done.returncode, done.stdout) == (0, b"300\n"), done.stderr.decode()


LEFT_OPEN = """
import sys
from barchan.sync import Client

client = Client(data=sys.argv[1])
process = client.get(sys.argv[2]).start("sleep")
print(process.stdout.read().decode(), end="")
"""


def test_a_client_left_open_does_not_hold_the_interpreter(place: Site, sandbox: Sandbox) -> None:
    argv = [sys.executable, "-W", "error", "-c", LEFT_OPEN, str(place.data), sandbox.id]
    done = subprocess.run(argv, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"sleeping\n", b"")


def test_nothing_of_the_asynchronous_client_is_loaded() -> None:
    code = "import sys, barchan.sync as b; b.Client; print([n for n in ('aiohttp', 'uvloop') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "[]\n"


# the pieces


def test_a_lock_is_given_in_the_order_of_asking() -> None:
    lock, order = _compat.Lock(), []

    def take(number: int) -> None:
        with lock:
            order.append(number)
            _compat.sleep(0)

    def all_at_once() -> None:
        tasks = [start(take, number) for number in range(10)]
        for task in tasks:
            task.wait()

    with_baton(all_at_once)
    assert sorted(order) == list(range(10))


def test_a_cancelled_wait_for_a_lock_takes_no_turn() -> None:
    lock = _compat.Lock()

    def take() -> str:
        with lock:
            return "had it"

    def holding() -> None:
        with lock:
            gives_up, waits = start(take), start(take)
            _compat.sleep(0.01)
            gives_up.cancel()
            with pytest.raises(Cancelled):
                gives_up.wait()
        assert waits.wait() == "had it"

    with_baton(holding)


def test_results_come_in_order(sandbox: Sandbox) -> None:
    assert [r.text for r in together(*(partial(sandbox.run, f"echo {i}") for i in range(5)))] == [
        f"{i}\n" for i in range(5)
    ]
