"""The guest's connection under a host that reads late, in pieces, acknowledges at will and dials again: exact bytes, no stall."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import random
import select
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from barchan.wire.frames import FrameType, encode, encode_credit, encode_data, encode_eof
from barchan.wire.guest import ExecFlag, GuestOutcome, OpKind
from tests.host.guest_client import WAIT, Guest, Link, Result, exec_parts

EPOLLOUT = 0x4
STRESS_SECONDS = 5.0
PROGRAMS = 6


def waits_for_room(guest: Guest) -> bool:
    """The guest's epoll watches a descriptor for output; of the connection, as no program takes input here."""
    for fd in Path(f"/proc/{guest.pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # it may be closed at any moment
            watched = [line.split()[3] for line in fd.read_text().splitlines() if line.startswith("tfd:")]
            if any(int(events, 16) & EPOLLOUT for events in watched):
                return True
    return False


def cpu_ticks(guest: Guest) -> int:
    fields = Path(f"/proc/{guest.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def stays_idle(guest: Guest, link: Link) -> None:
    """Nothing to do: for 200 ms the guest neither speaks nor runs."""
    before = cpu_ticks(guest)
    assert not select.select([link.sock], [], [], 0.2)[0]
    assert cpu_ticks(guest) - before <= 1  # one tick is 10 ms


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


def unread(link: Link) -> int:
    waiting = array.array("i", [0])
    fcntl.ioctl(link.sock.fileno(), termios.FIONREAD, waiting)
    return waiting[0]


def test_the_rest_of_a_frame_leaves_when_the_host_reads_on(guest: Guest) -> None:
    """The last frame of a program that then is silent: no later event pushes out what the socket did not take of it."""
    stopped = 0
    with guest.dial(acks=False) as link:
        for size in range(
            100_000, 1_040_000, 20_000
        ):  # the socket's room is the host's; at some size the last frame is cut
            op = guest.next_op()
            script = f"head -c {size} /dev/zero; head -c {size} /dev/zero >&2; exec sleep 300"
            result = link.start(op, OpKind.EXEC, exec_parts("sh", "-c", script))
            until(lambda size=size: unread(link) > 2 * size or waits_for_room(guest))
            stopped += waits_for_room(guest)
            link.until(lambda r=result, size=size: (len(r.stdout), len(r.stderr)) == (size, size))  # type: ignore[misc]
            link.send(encode(FrameType.CANCEL, op))
            assert link.wait(op).outcome == GuestOutcome.CANCELLED
            link.forget(op)
        link.ping()
        stays_idle(guest, link)
    assert stopped > 10


def test_what_the_host_has_recorded_may_be_acknowledged_before_it_is_sent_again(guest: Guest) -> None:
    """A node agent that was killed between recording and acknowledging does so first thing on its new connection."""
    op = guest.next_op()
    with guest.dial(acks=False) as link:
        link.start(op, OpKind.EXEC, exec_parts("sh", "-c", "seq 1 1000; read line; echo end", flags=ExecFlag.STDIN))
        link.until(lambda: link.results[op].stdout.endswith(b"\n1000\n"))
        results = link.results
    have = len(results[op].stdout)
    with guest.dial(results=results) as link:
        link.send(encode(FrameType.ACK, op, struct.pack("<Q", have), 1) + link.credits(op))
        link.send(encode_data(op, 0, 0, b"\n") + encode_eof(op, 0, 1))
        frame = link.next_frame()
        while frame.type != FrameType.DATA:
            frame = link.next_frame()
        assert frame.payload == struct.pack("<Q", have) + b"end\n"


class Unsteady:
    """A host with moods: each turn it grants, acknowledges, feeds, reads a little, or hangs up and dials again."""

    def __init__(self, guest: Guest, dice: random.Random) -> None:
        self.guest, self.dice = guest, dice
        self.results: dict[int, Result] = {}
        self.expected: dict[int, tuple[bytes, bytes]] = {}
        self.input: dict[int, bytes] = {}
        self.fed: dict[int, int] = {}
        self.programs: dict[int, bytes] = {}
        self.credit: dict[tuple[int, int], int] = {}
        self.link = self.dial()

    def dial(self) -> Link:
        link = Link(self.guest.path, acks=False, credit=0, results=self.results)
        self.credit.clear()
        known = {op.id: op for op in link.hello().ops}
        for op in self.results:
            self.fed[op] = known[op].taken if op in known else 0
            if op not in known:  # the old connection ended before the guest had read so far: never seen, safe to send
                link.start(op, OpKind.EXEC, self.programs[op])
        return link

    def start(self) -> None:
        op = self.guest.next_op()
        if self.dice.random() < 0.5:
            count = self.dice.randrange(1, 200_000)
            numbers = b"".join(b"%d\n" % number for number in range(1, count + 1))
            script = f"seq 1 {count} & seq 1 {count // 3} >&2; wait"
            self.expected[op] = (numbers, b"".join(b"%d\n" % number for number in range(1, count // 3 + 1)))
            self.programs[op] = exec_parts("sh", "-c", script)
        else:
            data = self.dice.randbytes(self.dice.randrange(1_500_000))
            self.expected[op], self.input[op], self.fed[op] = (data, b""), data, 0
            self.programs[op] = exec_parts("cat", flags=ExecFlag.STDIN)
        self.link.start(op, OpKind.EXEC, self.programs[op])

    def grant(self, op: int, most: int) -> None:
        for stream in (1, 2):
            have = len(self.results[op].out[stream])
            limit = max(self.credit.get((op, stream), 0), have + self.dice.randrange(1, most))
            self.credit[op, stream] = limit
            self.link.send(encode_credit(op, stream, limit))

    def acknowledge(self, op: int) -> None:
        for stream in (1, 2):
            upto = self.dice.randrange(len(self.results[op].out[stream]) + 1)
            self.link.send(encode(FrameType.ACK, op, struct.pack("<Q", upto), stream))

    def feed(self, op: int) -> None:
        data, at = self.input.get(op), self.fed.get(op, 0)
        if data is None or self.results[op].done:
            return
        again = self.dice.randrange(min(at, 1000) + 1)
        end = min(len(data), self.results[op].input_limit, at + self.dice.randrange(1, 100_000))
        if end > at:
            self.link.send(encode_data(op, 0, at - again, data[at - again : end]))
            self.fed[op] = end
        if end == len(data):
            self.link.send(encode_eof(op, 0, len(data)))

    def read(self) -> None:
        """At most one piece, if one comes soon; then the whole frames that it completed."""
        if select.select([self.link.sock], [], [], 0.02)[0]:
            data = self.link.sock.recv(self.dice.choice((1, 17, 4096, 1 << 16, 1 << 18)))
            assert data, "the guest hung up"
            self.link.queue.extend(self.link.reader.feed(data))
        while self.link.queue:
            self.link.step()

    def close(self) -> None:
        self.link.close()

    def turn(self) -> None:
        op = self.dice.choice(list(self.results))
        mood = self.dice.random()
        if mood < 0.2:
            self.grant(op, 400_000)
        elif mood < 0.4:
            self.acknowledge(op)
        elif mood < 0.6:
            self.feed(op)
        elif mood < 0.985:
            self.read()
        else:
            self.link.close()
            self.link = self.dial()

    def settle(self) -> None:
        """An ordinary host takes over: everything comes to its end."""
        self.link.close()
        self.link = self.dial()
        self.link.acks = True
        for op in self.results:
            self.grant(op, 1 << 40)
        for op, data in self.input.items():
            if not self.results[op].done:
                self.finish_input(op, data)
        for op in self.results:
            self.link.wait(op)

    def finish_input(self, op: int, data: bytes) -> None:
        at = self.fed[op]
        while at < len(data):
            end = min(len(data), at + (1 << 16), self.results[op].input_limit)
            if end == at:
                self.link.step()
                continue
            self.link.send(encode_data(op, 0, at, data[at:end]))
            at = end
        self.link.send(encode_eof(op, 0, len(data)))


@pytest.mark.parametrize("seed", range(3))
def test_every_byte_arrives_whatever_the_host_does(guest: Guest, seed: int) -> None:
    host = Unsteady(guest, random.Random(seed))
    with contextlib.closing(host):
        end = time.monotonic() + STRESS_SECONDS
        while time.monotonic() < end:
            if sum(not result.done for result in host.results.values()) < PROGRAMS:
                host.start()
            host.turn()
        host.settle()
        for op, (out, err) in host.expected.items():
            assert (host.results[op].stdout, host.results[op].stderr) == (out, err), op
            assert host.results[op].eof == {1: (len(out), 0), 2: (len(err), 0)}
            host.link.forget(op)
        host.link.ping()
        stays_idle(guest, host.link)
