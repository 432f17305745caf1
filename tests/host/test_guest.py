"""The real guest binary, as an ordinary root process, over its socket: programs, connection and malformed frames."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import resource
import signal
import struct
import time
from pathlib import Path

import pytest

from barchan.wire import guest as wire
from barchan.wire.frames import FrameType, encode, encode_credit, encode_data, encode_eof
from barchan.wire.guest import Done, ExecFlag, GuestOutcome, OpKind
from tests.host.guest_client import Guest, Hangup, Link, Result, exec_parts, running_guest

EXITED, TIMED_OUT, CANCELLED, FAILED = (
    GuestOutcome.EXITED,
    GuestOutcome.TIMED_OUT,
    GuestOutcome.CANCELLED,
    GuestOutcome.FAILED,
)


def run(guest: Guest, link: Link, *argv: str | bytes, **options: object) -> tuple[Done, bytes, bytes]:
    op = guest.next_op()
    result = link.start(op, OpKind.EXEC, exec_parts(*argv, **options))  # type: ignore[arg-type]
    done = link.wait(op)
    link.forget(op)
    return done, result.stdout, result.stderr


def survivors(guest: Guest) -> list[int]:
    return [pid for pids in guest.pids().values() for pid in pids]


def test_output_streams_and_exit_code(guest: Guest, link: Link) -> None:
    op = guest.next_op()
    result = link.start(op, OpKind.EXEC, exec_parts("sh", "-c", "printf out; printf err >&2; exit 3"))
    done = link.wait(op)
    assert (done.outcome, done.code, done.background) == (EXITED, 3, 0)
    assert (result.stdout, result.stderr) == (b"out", b"err")
    assert result.eof == {1: (3, 0), 2: (3, 0)}
    assert result.started and done.max_rss > 100_000 and done.wall_ns > 0


def test_merged_output_keeps_its_order(guest: Guest, link: Link) -> None:
    done, out, err = run(guest, link, "sh", "-c", "echo 1; echo 2 >&2; echo 3", flags=ExecFlag.MERGE)
    assert (done.code, out, err) == (0, b"1\n2\n3\n", b"")


def test_a_signal_is_its_own_outcome(guest: Guest, link: Link) -> None:
    done, _, _ = run(guest, link, "sh", "-c", "kill -USR1 $$")
    assert (done.outcome, done.code) == (GuestOutcome.SIGNALED, signal.SIGUSR1)


def test_without_input_a_reader_sees_the_end_at_once(guest: Guest, link: Link) -> None:
    assert run(guest, link, "cat")[0].code == 0


def test_fifty_mebibytes_of_input(guest: Guest, link: Link) -> None:
    data = os.urandom(1 << 20) * 50
    op = guest.next_op()
    result = link.start(op, OpKind.EXEC, exec_parts("sha256sum", flags=ExecFlag.STDIN))
    link.feed(op, data)
    link.wait(op)
    assert result.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_input_of_a_program_that_does_not_read_is_credited_and_dropped(guest: Guest, link: Link) -> None:
    op = guest.next_op()
    link.start(op, OpKind.EXEC, exec_parts("sh", "-c", "exec <&-; sleep 60", flags=ExecFlag.STDIN))
    link.feed(op, bytes(4 << 20))
    link.send(encode(FrameType.CANCEL, op))
    assert link.wait(op).outcome == CANCELLED


def test_a_background_child_does_not_hold_the_answer(guest: Guest, link: Link) -> None:
    begun = time.monotonic()
    done, out, _ = run(guest, link, "sh", "-c", "sleep 300 & echo hi")
    assert (done.outcome, done.code, done.background, out) == (EXITED, 0, 1, b"hi\n")
    assert time.monotonic() - begun < 5
    assert len(survivors(guest)) == 1


def test_output_of_background_children_is_read_and_dropped(guest: Guest, link: Link) -> None:
    script = "(head -c 1000000 /dev/zero; echo over >/tmp/$0) & echo hi"
    name = f"guest-{guest.pid}"
    done, out, _ = run(guest, link, "sh", "-c", script, name)
    assert b"hi\n" in out and done.outcome == EXITED
    while survivors(guest):
        link.ping()
    assert Path("/tmp", name).read_text() == "over\n"
    Path("/tmp", name).unlink()


def test_waiting_for_end_of_file_keeps_what_background_children_write(guest: Guest, link: Link) -> None:
    done, out, _ = run(guest, link, "sh", "-c", "(sleep 0.2; echo late) & echo early", flags=ExecFlag.KEEP_BACKGROUND)
    assert out == b"early\nlate\n"
    assert done.background <= 1, "one that has closed its output may not have ended yet"


def test_groups_are_used_again(guest: Guest, link: Link) -> None:
    for _ in range(20):
        assert run(guest, link, "true")[0].code == 0
    assert len(guest.pids()) == 1


STUBBORN = """
trap '' TERM
sh -c "trap '' TERM; sleep 300 & wait; sleep 300" &
setsid sh -c "trap '' TERM; sleep 300; sleep 300" &
(setsid sh -c "trap '' TERM; sleep 300 & sleep 300" &) &
echo so far
sleep 300; sleep 300; sleep 300
"""


@pytest.mark.parametrize("grace_ms", [0, 300])
def test_a_timeout_leaves_nothing(guest: Guest, link: Link, grace_ms: int) -> None:
    begun = time.monotonic()
    done, out, _ = run(guest, link, "sh", "-c", STUBBORN, timeout_ms=500, grace_ms=grace_ms)
    assert (done.outcome, out, done.background) == (TIMED_OUT, b"so far\n", 0)
    assert 0.5 + grace_ms / 1000 <= time.monotonic() - begun < 5
    assert survivors(guest) == []
    assert run(guest, link, "echo", "next")[1] == b"next\n"


def test_a_program_may_end_itself_in_its_grace(guest: Guest, link: Link) -> None:
    begun = time.monotonic()
    done, out, _ = run(
        guest,
        link,
        "sh",
        "-c",
        "trap 'echo bye; exit 0' TERM; while :; do sleep 0.01; done",
        timeout_ms=200,
        grace_ms=30_000,
    )
    assert (done.outcome, out) == (TIMED_OUT, b"bye\n")
    assert time.monotonic() - begun < 10


def test_a_chain_of_forks_does_not_outrun_the_kill(guest: Guest, link: Link) -> None:
    chain = "f() { (f) & exit; }; f & f & f & exec sleep 300"
    done, _, _ = run(guest, link, "sh", "-c", chain, timeout_ms=500)
    assert done.outcome == TIMED_OUT
    assert survivors(guest) == []


def test_cancel_kills_at_once(guest: Guest, link: Link) -> None:
    op = guest.next_op()
    result = link.start(op, OpKind.EXEC, exec_parts("sh", "-c", STUBBORN))
    link.until(lambda: result.stdout)
    link.send(encode(FrameType.CANCEL, op))
    assert link.wait(op).outcome == CANCELLED
    assert survivors(guest) == []


def test_signals_to_the_group_and_to_everyone(guest: Guest, link: Link) -> None:
    script = "trap 'echo main' USR1; setsid sh -c \"trap 'echo other; exit' USR1; echo up; while :; do sleep 0.01; done\" & while :; do sleep 0.01; done"
    op = guest.next_op()
    result = link.start(op, OpKind.EXEC, exec_parts("sh", "-c", script))
    link.until(lambda: b"up" in result.stdout)
    link.send(wire.signal(op, signal.SIGUSR1, False))
    link.until(lambda: b"main" in result.stdout)
    assert b"other" not in result.stdout
    link.send(wire.signal(op, signal.SIGUSR1, True))
    link.until(lambda: b"other" in result.stdout)
    link.send(encode(FrameType.CANCEL, op))
    link.wait(op)


def test_what_exceeds_the_output_limit_is_counted_and_dropped(guest: Guest, link: Link) -> None:
    op = guest.next_op()
    result = link.start(
        op, OpKind.EXEC, exec_parts("sh", "-c", "head -c 3000000 /dev/zero; echo err >&2", limit=100_000)
    )
    assert link.wait(op).code == 0
    assert len(result.stdout) == 100_000
    assert result.eof == {1: (3_000_000, 2_900_000), 2: (4, 0)}


def test_without_acknowledgement_the_program_waits(guest: Guest) -> None:
    with guest.dial(acks=False) as link:
        op = guest.next_op()
        result = link.start(op, OpKind.EXEC, exec_parts("head", "-c", "3000000", "/dev/zero"))
        link.until(lambda: len(result.stdout) == 1 << 20)
        link.ping()
        assert len(result.stdout) == 1 << 20 and not result.done
        while not result.done:
            link.send(encode(FrameType.ACK, op, struct.pack("<Q", len(result.stdout)), 1))
            link.step()
        assert len(result.stdout) == 3_000_000


def test_no_byte_without_credit(guest: Guest) -> None:
    with guest.dial(credit=0) as link:
        op = guest.next_op()
        result = link.start(op, OpKind.EXEC, exec_parts("echo", "hello"))
        link.until(lambda: result.started)
        link.ping()
        assert result.stdout == b"" and not result.done
        link.send(encode_credit(op, 1, 2))
        link.until(lambda: result.stdout == b"he")
        link.send(encode_credit(op, 1, 100) + encode_credit(op, 2, 100))
        assert link.wait(op).code == 0 and result.stdout == b"hello\n"


def test_a_new_connection_goes_on_without_gap_or_repetition(guest: Guest) -> None:
    script = "i=0; while [ $i -lt 200000 ]; do echo $i; i=$((i+1)); done"
    expected = b"".join(b"%d\n" % i for i in range(200_000))
    op = guest.next_op()
    with guest.dial() as link:
        result = link.start(op, OpKind.EXEC, exec_parts("sh", "-c", script))
        link.until(lambda: len(result.stdout) > 100_000)
        results, boot = link.results, None
    for _ in range(3):
        link = Link(guest.path, results=results)
        welcome = link.hello()
        assert boot in (None, welcome.boot) and welcome.last == op
        boot = welcome.boot
        (known,) = welcome.ops
        assert known.id == op and known.out_base <= len(result.stdout) and known.pid > 0
        link.send(link.credits(op))
        seen = len(result.stdout)
        link.until(lambda seen=seen: len(result.stdout) > seen or result.done)  # type: ignore[misc]
        link.close()
    with guest.dial(results=results) as link:
        link.send(link.credits(op))
        link.wait(op)
    assert result.stdout == expected


def test_a_result_is_told_again_until_it_is_forgotten(guest: Guest) -> None:
    op = guest.next_op()
    with guest.dial() as link:
        link.start(op, OpKind.EXEC, exec_parts("sh", "-c", "echo once; exit 9"))
        link.wait(op)
    with guest.dial() as link:
        result = link.results[op] = Result()
        link.send(link.credits(op))
        assert link.wait(op).code == 9
        assert result.eof[1] == (5, 0)
        link.forget(op)
        link.ping()
    again = Link(guest.path)
    assert again.hello().ops == ()
    again.close()


def test_input_goes_on_after_a_new_connection(guest: Guest) -> None:
    op = guest.next_op()
    with guest.dial() as link:
        link.start(op, OpKind.EXEC, exec_parts("cat", flags=ExecFlag.STDIN))
        link.send(encode_data(op, 0, 0, b"hello "))
        link.until(lambda: link.results[op].stdout == b"hello ")
        results = link.results
    link = Link(guest.path, results=results)
    (known,) = link.hello().ops
    assert known.taken == 6
    link.send(link.credits(op) + encode_data(op, 0, 3, b"lo world") + encode_eof(op, 0, 11))
    link.wait(op)
    assert results[op].stdout == b"hello world"
    link.close()


def test_a_timeout_works_while_no_host_is_attached(guest: Guest) -> None:
    op = guest.next_op()
    with guest.dial() as link:
        link.start(op, OpKind.EXEC, exec_parts("sleep", "300", timeout_ms=300))
        link.until(lambda: link.results[op].started)
        results = link.results
    while survivors(guest):
        os.sched_yield()
    with guest.dial(results=results) as link:
        link.send(link.credits(op))
        assert link.wait(op).outcome == TIMED_OUT


def test_a_newer_connection_replaces_the_older(guest: Guest) -> None:
    with guest.dial() as first, guest.dial() as second:
        second.ping()
        with pytest.raises(Hangup):
            first.ping()


def test_an_id_starts_once(guest: Guest, link: Link) -> None:
    run(guest, link, "true")
    result = link.start(1, OpKind.EXEC, exec_parts("true"))
    link.until(lambda: result.refused)
    assert result.refused and result.refused[0] == wire.Refusal.KNOWN


def test_a_malformed_request_is_refused_and_its_id_stays_free(guest: Guest, link: Link) -> None:
    op = guest.next_op()
    for parts in ((b"\x01\x02",), (exec_parts(),), (exec_parts("a\0b"),), (exec_parts("true", flags=64),)):
        result = link.start(op, OpKind.EXEC, *parts)
        link.until(lambda result=result: result.refused)  # type: ignore[misc]
        assert result.refused and result.refused[0] == wire.Refusal.BAD
        result.refused = None
    assert link.start(op, OpKind.EXEC, exec_parts("true")) and link.wait(op).code == 0


def test_too_many_operations_are_refused(guest: Guest, link: Link) -> None:
    ops = [guest.next_op() for _ in range(1025)]
    for op in ops:
        link.start(op, OpKind.STAT, wire.blob(b"/"), b"\1")
    link.until(lambda: all(link.results[op].done or link.results[op].refused for op in ops))
    refused = [op for op in ops if link.results[op].refused]
    assert refused == [ops[-1]] and link.results[ops[-1]].refused[0] == wire.Refusal.BUSY  # type: ignore[index]


def test_hundreds_of_programs_at_once(guest: Guest, link: Link) -> None:
    ops = [guest.next_op() for _ in range(512)]
    for op in ops:
        link.start(op, OpKind.EXEC, exec_parts("sh", "-c", f"read x; echo {op}", flags=ExecFlag.STDIN))
    link.until(lambda: all(link.results[op].started for op in ops))
    for op in ops:
        link.send(encode_data(op, 0, 0, b"\n") + encode_eof(op, 0, 1))
    for op in ops:
        assert link.wait(op).code == 0 and link.results[op].stdout == b"%d\n" % op


@pytest.mark.parametrize(
    ("options", "argv", "user", "code", "detail"),
    [
        ({}, ("no-such-program",), b"", 2, b"exec"),
        ({}, ("/no/such/program",), b"", 2, b"exec"),
        ({}, ("/etc/passwd",), b"", 13, b"exec"),
        ({}, ("/",), b"", 13, b"exec"),
        ({"cwd": b"/no/such/place"}, ("true",), b"", 2, b"cwd"),
        ({"cwd": b"/etc/passwd"}, ("true",), b"", 20, b"cwd"),
        ({"cwd": b"/root"}, ("true",), b"1000:1000", 13, b"cwd"),
        ({}, ("true",), b"no-such-user", 2, b"user"),
        ({}, ("true",), b"root:no-such-group", 2, b"user"),
        ({}, ("true", "x" * (128 << 10)), b"", 7, b"exec"),
    ],
)  # fmt: skip
def test_what_fails_before_the_program_runs(
    guest: Guest, link: Link, options: dict[str, bytes], argv: tuple[str, ...], user: bytes, code: int, detail: bytes
) -> None:
    Path("/root").chmod(0o700)
    op = guest.next_op()
    link.start(op, OpKind.EXEC, exec_parts(*argv, **options), user=user)  # type: ignore[arg-type]
    done = link.wait(op)
    assert (done.outcome, done.code, done.detail) == (FAILED, code, detail)


def test_users_groups_and_their_environment(guest: Guest, link: Link) -> None:
    expected = {
        b"": (b"uid=0 gid=0", b"/root root root"),
        b"daemon": (b"uid=1 gid=1", b"/usr/sbin daemon daemon"),
        b"12345": (b"uid=12345 gid=0", b"/"),
        b"12345:54321": (b"uid=12345 gid=54321", b"/"),
        b"daemon:games": (b"uid=1 gid=60", b"/usr/sbin daemon daemon"),
    }
    script = 'echo "uid=$(id -u) gid=$(id -g)"; echo $HOME $USER $LOGNAME; grep ^Cap[IPEA] /proc/self/status; echo x >/dev/stdout'
    for user, (ids, home) in expected.items():
        op = guest.next_op()
        result = link.start(op, OpKind.EXEC, exec_parts("sh", "-c", script), user=user)
        assert link.wait(op).code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert (lines[0], lines[1], lines[-1]) == (ids, home, b"x")
        if not ids.startswith(b"uid=0 "):
            assert {line.split()[1] for line in lines if line.startswith(b"Cap")} == {b"0" * 16}


def test_thousands_of_variables_and_long_arguments(guest: Guest, link: Link) -> None:
    env = [b"V%d=\xff\xfe=%d" % (i, i) for i in range(2000)] + [b"PATH=/usr/bin:/bin", b"HOME=/elsewhere"]
    done, out, _ = run(guest, link, "env", "-0", env=env)
    assert done.code == 0 and set(env) <= set(out.split(b"\0"))
    argument = bytes(range(1, 256)) * 514
    done, out, _ = run(guest, link, "printf", "%s", argument[: (128 << 10) - 1])
    assert out == argument[: (128 << 10) - 1]


def test_the_limit_on_open_files(guest: Guest, link: Link) -> None:
    inherited = run(guest, link, "sh", "-c", "ulimit -n")[1]
    assert int(inherited) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert run(guest, link, "sh", "-c", "ulimit -Sn; ulimit -Hn", nofile=77)[1] == b"77\n77\n"


def test_signal_dispositions_are_the_default(guest: Guest, link: Link) -> None:
    _, out, _ = run(guest, link, "grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")
    assert {line.split()[1] for line in out.splitlines()} == {b"0" * 16}


def test_nothing_of_the_guest_leaks_into_a_program(guest: Guest, link: Link) -> None:
    assert run(guest, link, "ls", "/proc/self/fd")[1] == b"0\n1\n2\n3\n"  # 3 is the directory that ls reads
    _, out, _ = run(guest, link, "sh", "-c", "umask; cut -d' ' -f5,6 /proc/$$/stat; echo $$")
    umask, session, pid = out.split(b"\n")[:3]
    assert umask == b"0022" and session == pid + b" " + pid


MALFORMED = [
    b"\xff\xff\xff\xff" + bytes(12),
    struct.pack("<IBBHQ", 0, FrameType.PING, 0, 1, 0),
    encode(0x30, 1),
    encode(FrameType.WELCOME, 1, bytes(24)),
    encode(FrameType.HELLO, 0, struct.pack("<HH", 1, 1)),
    encode(FrameType.PING, 0, bytes(65)),
    encode(FrameType.ACK, 1, bytes(8), 0),
    encode(FrameType.ACK, 1, struct.pack("<Q", 1 << 40), 1),
    encode(FrameType.SIGNAL, 1, struct.pack("<II", 99, 0)),
    encode(FrameType.DATA, 1, bytes(3)),
    encode_data(1, 0, 5, b"gap"),
    encode_data(1, 0, (1 << 64) - 1, b"wraps"),
]


@pytest.mark.parametrize("frame", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_frame_ends_the_connection_not_the_guest(guest: Guest, frame: bytes) -> None:
    with guest.dial() as link:
        link.start(1, OpKind.EXEC, exec_parts("cat", flags=ExecFlag.STDIN))
        link.until(lambda: link.results[1].started)
        link.send(frame)
        with pytest.raises(Hangup):
            link.ping()
    again = Link(guest.path)
    assert [known.id for known in again.hello().ops] == [1]
    again.close()


def random_frame(dice: random.Random, last: int) -> bytes:
    """Anything but START, which would carry out what chance asks for."""
    type_ = dice.choice([t for t in range(1, 0x1A) if t != FrameType.START])
    edges = (0, 1, 5, 1 << 16, 1 << 20, (1 << 64) - 1, dice.getrandbits(64))
    payload = b"".join(struct.pack("<Q", dice.choice(edges)) for _ in range(dice.randrange(3)))
    payload += dice.randbytes(dice.choice((0, 0, 0, 1, 4, 60)))
    return encode(type_, dice.randrange(last + 2), payload, dice.choice((0, 1, 2, 2, 3)))


@pytest.mark.parametrize("seed", range(4))
def test_random_frames_never_end_the_guest(guest: Guest, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(100):
        with guest.dial(acks=False) as link:
            op = guest.next_op()
            link.start(op, OpKind.EXEC, exec_parts("sh", "-c", "cat; head -c 200000 /dev/zero", flags=ExecFlag.STDIN))
            with contextlib.suppress(Hangup):
                for _ in range(dice.randrange(1, 12)):
                    link.send(random_frame(dice, op))
    with guest.dial() as link:
        link.ping()
    assert guest.memory_kib() < 200_000


def test_input_beyond_the_credit_ends_the_connection(guest: Guest) -> None:
    with guest.dial() as link:
        link.start(1, OpKind.EXEC, exec_parts("sleep", "300", flags=ExecFlag.STDIN))
        with pytest.raises(Hangup):
            for at in range(0, 1 << 20, 1 << 16):
                link.send(encode_data(1, 0, at, bytes(1 << 16)))
            link.ping()


def test_frames_for_unknown_operations_are_ignored(guest: Guest, link: Link) -> None:
    for type_, stream, payload in (
        (FrameType.DATA, 0, bytes(9)), (FrameType.EOF, 0, bytes(16)), (FrameType.CREDIT, 1, bytes(8)), (FrameType.ACK, 2, bytes(8)),
        (FrameType.SIGNAL, 0, bytes(8)), (FrameType.CANCEL, 0, b""), (FrameType.FORGET, 0, b""),
    ):  # fmt: skip
        link.send(encode(type_, 99, payload, stream))
    link.ping()


def test_no_common_version(guest: Guest) -> None:
    link = Link(guest.path)
    link.send(encode(FrameType.HELLO, 0, struct.pack("<HH", 7, 9)))
    assert wire.decode_welcome(link.next_frame().payload).version == 0
    with pytest.raises(Hangup):
        link.next_frame()
    link.close()


def test_frames_in_single_bytes(guest: Guest) -> None:
    link = Link(guest.path)
    for byte in wire.hello() + wire.start(1, OpKind.EXEC, b"", exec_parts("echo", "hi")) + link.credits(1):
        link.send(bytes([byte]))
    assert link.next_frame().type == FrameType.WELCOME
    link.results[1] = Result()
    assert link.wait(1).code == 0
    link.close()


def test_a_host_that_never_reads_is_cut_off_and_the_guest_lives(guest: Guest) -> None:
    link = Link(guest.path)
    link.hello()
    ping = encode(FrameType.PING, 0, bytes(64)) * 1000
    with pytest.raises(Hangup):
        for _ in range(1000):
            link.send(ping)
    link.close()
    with guest.dial() as fresh:
        fresh.ping()


def test_without_cgroups_the_process_group_is_ended(guest_binary: Path) -> None:
    with running_guest(guest_binary, grouped=False) as guest, guest.dial() as link:
        done, out, _ = run(guest, link, "sh", "-c", "echo hi; sleep 300 & sleep 300", timeout_ms=200)
        assert (done.outcome, out) == (TIMED_OUT, b"hi\n")
        assert run(guest, link, "echo", "next")[1] == b"next\n"


def test_two_hundred_megabytes_stay_out_of_memory(guest: Guest, link: Link) -> None:
    op, size = guest.next_op(), 200_000_000
    idle = guest.memory_kib()
    link.start(op, OpKind.EXEC, exec_parts("head", "-c", str(size), "/dev/zero"))
    received, begun = 0, time.monotonic()
    while not received or received < size:
        frame = link.next_frame()
        if frame.type == FrameType.DATA:
            assert struct.unpack_from("<Q", frame.payload)[0] == received
            received += len(frame.payload) - 8
            link.send(encode(FrameType.ACK, op, struct.pack("<Q", received), 1))
    seconds = time.monotonic() - begun
    busy = guest.memory_kib()
    print(f"{size / seconds / 1e6:.0f} MB/s, idle {idle} KiB, busy {busy} KiB")
    assert busy < idle + 2500
