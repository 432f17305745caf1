"""The real guest where something runs out or somebody interferes: open files, processes, stopped programs."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.wire.frames import FrameType, encode
from barchan.wire.guest import ExecFlag, GuestOutcome, OpKind, blob
from tests.host.guest_client import WAIT, Guest, Link, exec_parts, running_guest
from tests.host.test_guest_mapped import MappedGuest, installed_guest

PIDS = Path("/sys/fs/cgroup/pids")
CANCELLED, FAILED, TIMED_OUT = GuestOutcome.CANCELLED, GuestOutcome.FAILED, GuestOutcome.TIMED_OUT


def start(guest: Guest, link: Link, script: str, **options: int) -> int:
    op = guest.next_op()
    link.start(op, OpKind.EXEC, exec_parts("sh", "-c", script, **options))  # type: ignore[arg-type]
    return op


def failure(guest: Guest, link: Link) -> tuple[int, bytes]:
    done = link.wait(start(guest, link, "true"))
    assert done.outcome == FAILED
    return done.code, done.detail


def stat_works(guest: Guest, link: Link) -> None:
    op = guest.next_op()
    link.start(op, OpKind.STAT, blob(b"/"), b"\0")
    assert link.wait(op).outcome == GuestOutcome.EXITED


def limit_files(guest: Guest, most: int) -> None:
    _, hard = resource.prlimit(guest.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(guest.pid, resource.RLIMIT_NOFILE, (most, hard))


def open_files(guest: Guest) -> int:
    return len(os.listdir(f"/proc/{guest.pid}/fd"))


def test_without_open_files_programs_fail_and_those_that_run_can_be_ended(guest: Guest, link: Link) -> None:
    running = start(guest, link, "echo up; setsid sleep 300 & exec sleep 300")
    late = start(guest, link, "exec sleep 300", timeout_ms=500)
    link.until(lambda: link.results[running].stdout and link.results[late].started)
    highest = max(int(fd) for fd in os.listdir(f"/proc/{guest.pid}/fd"))
    limit_files(guest, highest + 1)
    while (seen := failure(guest, link)) == (errno.EMFILE, b"user"):  # /etc/passwd cannot be read either
        limit_files(guest, highest := highest + 1)
    assert seen[0] == errno.EMFILE and seen[1] in (b"cgroup", b"fork")
    limit_files(guest, 3)
    link.send(encode(FrameType.CANCEL, running))
    assert link.wait(running).outcome == CANCELLED
    assert link.wait(late).outcome == TIMED_OUT
    assert [pid for pids in guest.pids().values() for pid in pids] == []
    limit_files(guest, 1024)
    assert link.wait(start(guest, link, "exit 3")).code == 3


def test_the_host_gets_through_without_open_files(guest: Guest) -> None:
    with guest.dial() as link:
        link.ping()
        limit_files(guest, open_files(guest))
        assert failure(guest, link) == (errno.EMFILE, b"user")
        with guest.dial() as second:  # while the first is still there
            second.ping()
    for _ in range(3):
        with guest.dial() as again:
            again.ping()
            assert failure(guest, again) == (errno.EMFILE, b"user")


@contextlib.contextmanager
def process_limit(guest: Guest) -> Iterator[Path]:
    """A group of the pids hierarchy that the guest is in; the file with its limit."""
    if not (PIDS / "cgroup.procs").exists():
        pytest.skip("no v1 pids hierarchy")
    group = PIDS / f"barchan-test-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(guest.pid))
        yield group / "pids.max"
    finally:
        (PIDS / "cgroup.procs").write_text(str(guest.pid))
        group.rmdir()


def test_at_the_limit_of_processes_programs_fail_and_files_go_on(guest: Guest, link: Link) -> None:
    with process_limit(guest) as limit:
        running = start(guest, link, "echo up; exec sleep 300")
        link.until(lambda: link.results[running].stdout)
        limit.write_text("2")
        assert failure(guest, link) == (errno.EAGAIN, b"fork")
        stat_works(guest, link)
        files, groups = open_files(guest), len(guest.pids())
        for _ in range(20):
            assert failure(guest, link) == (errno.EAGAIN, b"fork")
        assert (open_files(guest), len(guest.pids())) == (files, groups)
        link.send(encode(FrameType.CANCEL, running))
        assert link.wait(running).outcome == CANCELLED
        assert link.wait(start(guest, link, "exit 4")).code == 4


@pytest.mark.parametrize("acks", [True, False])
def test_a_kill_amid_output_ends_it_without_a_gap(guest: Guest, acks: bool) -> None:
    with guest.dial(acks=acks) as link:
        op = guest.next_op()
        result = link.start(op, OpKind.EXEC, exec_parts("sh", "-c", "yes & yes >&2 & exec cat /dev/zero"))
        link.until(lambda: len(result.stdout) > 100_000)
        link.send(encode(FrameType.CANCEL, op))
        while any(guest.pids().values()):
            link.ping()
        link.acks = True  # what is in the pipes may need room that only acknowledgements make
        for stream in (1, 2):
            link.send(encode(FrameType.ACK, op, struct.pack("<Q", len(result.out[stream])), stream))
        assert link.wait(op).outcome == CANCELLED
        assert result.eof == {1: (len(result.stdout), 0), 2: (len(result.stderr), 0)}


@pytest.mark.parametrize("signals", [b"STOP", b"STOP TSTP"])
def test_stopped_programs_hold_up_nobody_and_can_be_ended(guest: Guest, link: Link, signals: bytes) -> None:
    ops = [start(guest, link, "echo up; while :; do echo x; done", timeout_ms=500 * n, grace_ms=100) for n in (0, 1)]
    link.until(lambda: all(link.results[op].stdout for op in ops))
    pids = " ".join(str(link.results[op].started) for op in ops)
    script = "".join(f"kill -{name} {pids};" for name in signals.decode().split())
    assert link.wait(start(guest, link, script)).code == 0
    assert link.wait(start(guest, link, "exit 5")).code == 5
    assert link.wait(ops[1]).outcome == TIMED_OUT
    link.send(encode(FrameType.CANCEL, ops[0]))
    assert link.wait(ops[0]).outcome == CANCELLED


def test_root_inside_may_not_stop_the_guest_by_its_group(guest: Guest, link: Link) -> None:
    """Programs are sessions of their own: a signal to their own group, or session, reaches nobody else."""
    op = start(guest, link, "kill -STOP 0")
    link.until(lambda: link.results[op].started)
    stat_works(guest, link)
    link.send(encode(FrameType.CANCEL, op))
    assert link.wait(op).outcome == CANCELLED


def stopped_before_exec(guest: Guest) -> bool:
    """Stops a child of the guest that has become uid 12345 and is no program yet."""
    for pid in (pid for pids in guest.pids().values() for pid in pids):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            if "Name:\tinit\n" in status and "Uid:\t12345\t" in status:
                os.kill(pid, signal.SIGSTOP)
                return "Name:\tinit\n" in Path(f"/proc/{pid}/status").read_text()
    return False


def test_a_user_may_stop_its_program_before_it_is_one(guest: Guest, link: Link) -> None:
    """Its other programs may signal the child as soon as it has the user's id. A search path that takes long to walk makes time."""
    path = b"PATH=" + b":".join(b"/%d" % i for i in range(16_000)) + b":/usr/bin:/bin"
    end = time.monotonic() + WAIT
    for timeout_ms in (0, 1000):
        stopped = False
        while not stopped:
            assert time.monotonic() < end
            op = guest.next_op()
            parts = exec_parts("sleep", "300", env=[path], timeout_ms=timeout_ms)
            result = link.start(op, OpKind.EXEC, parts, user=b"12345:12345")
            while not stopped and result.started is None:
                link.ping()
                stopped = stopped_before_exec(guest)
            if not stopped:
                link.send(encode(FrameType.CANCEL, op))
                link.wait(op)
                link.forget(op)
        assert link.wait(start(guest, link, "exit 6")).code == 6
        stat_works(guest, link)
        assert result.started is None
        if not timeout_ms:
            link.send(encode(FrameType.CANCEL, op))
        assert link.wait(op).outcome == (TIMED_OUT if timeout_ms else CANCELLED)


class UnfilteredGuest(MappedGuest):
    """clone3 is let through, and no filter can be set: neither no_new_privs nor SYS_ADMIN."""

    no_new_privs = False


def test_a_program_that_cannot_be_kept_from_clone3_is_not_started(tmp_path: Path) -> None:
    with installed_guest() as binary, running_guest(binary, kind=UnfilteredGuest) as guest, guest.dial() as link:
        marker = tmp_path / "ran"
        op = guest.next_op()
        parts = exec_parts("sh", "-c", f"echo > {marker}", flags=ExecFlag.MERGE)
        link.start(op, OpKind.EXEC, parts)
        done = link.wait(op)
        assert (done.outcome, done.code, done.detail) == (FAILED, errno.EACCES, b"seccomp")
        assert not marker.exists()
        stat_works(guest, link)
