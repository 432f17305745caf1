"""What the guest says becomes what the caller is told."""

from __future__ import annotations

import errno

import pytest

from barchan.errors import ErrorBody
from barchan.node.outcome import Ended, ended, limit_of, result_of, shell_ended, suspicious
from barchan.spec import ExecId, ExecResult
from barchan.wire.guest import Done, GuestOutcome


def done(outcome: GuestOutcome, code: int = 0, detail: bytes = b"") -> Done:
    return Done(outcome, code, 1_500_000_000, 20_000, 10_000, 1 << 20, 2, detail)


@pytest.mark.parametrize(
    ("said", "outcome", "exit_code", "signal"),
    [
        (done(GuestOutcome.EXITED, 0), "exited", 0, None),
        (done(GuestOutcome.EXITED, 3), "exited", 3, None),
        (done(GuestOutcome.SIGNALED, 9), "signaled", 137, 9),
        (done(GuestOutcome.TIMED_OUT), "timed_out", None, None),
        (done(GuestOutcome.CANCELLED), "cancelled", None, None),
        (done(GuestOutcome.FAILED, errno.ENOENT, b"exec"), "not_found", 127, None),
        (done(GuestOutcome.FAILED, errno.ENOTDIR, b"exec"), "not_found", 127, None),
        (done(GuestOutcome.FAILED, errno.EACCES, b"exec"), "not_executable", 126, None),
        (done(GuestOutcome.FAILED, errno.ENOEXEC, b"exec"), "not_executable", 126, None),
    ],
)
def test_outcome(said: Done, outcome: str, exit_code: int | None, signal: int | None) -> None:
    end = ended(said)
    assert (end.outcome, end.exit_code, end.signal) == (outcome, exit_code, signal)
    assert end.error is None


@pytest.mark.parametrize(
    ("code", "step", "error", "field"),
    [
        (errno.ENOENT, b"user", "user_not_found", "user"),
        *(
            (code, step, "sandbox_unavailable", "")
            for code in (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
            for step in (b"user", b"cwd", b"tty", b"cgroup", b"shell", b"exec")
        ),
        (errno.ENOSPC, b"tty", "terminals_taken", "tty"),
        (errno.ENODEV, b"tty", "sandbox_unavailable", ""),
        (errno.ENOENT, b"cwd", "file_missing", "cwd"),
        (errno.ENOTDIR, b"cwd", "file_not_directory", "cwd"),
        (errno.EACCES, b"cwd", "file_denied", "cwd"),
        (errno.ELOOP, b"cwd", "file_failure", "cwd"),
        (errno.E2BIG, b"exec", "invalid_request", "argv"),
        (errno.EAGAIN, b"fork", "sandbox_unavailable", ""),
        (errno.ESRCH, b"shell", "shell_ended", ""),
        (errno.EBUSY, b"shell", "shell_busy", ""),
    ],
)
def test_what_could_not_start_is_a_typed_error(code: int, step: bytes, error: str, field: str) -> None:
    end = ended(done(GuestOutcome.FAILED, code, step))
    assert end.outcome == "failed" and end.error is not None
    assert (end.error.code, end.error.field) == (error, field)
    result = result_of(ExecId("x"), done(GuestOutcome.FAILED), end, None, ((0, 0), (0, 0)))
    assert result.error is not None and result.error.code == error


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (None, "has ended"),
        (ExecResult(id=ExecId("s"), outcome="exited", exit_code=3), "has ended: exit code 3"),
        (ExecResult(id=ExecId("s"), outcome="signaled", exit_code=137, signal=9), "has ended: signal 9"),
        (ExecResult(id=ExecId("s"), outcome="signaled", signal=9, limit="oom"), "has ended: the sandbox's limit oom"),
        (ExecResult(id=ExecId("s"), outcome="timed_out"), "has ended: timed out"),
        (ExecResult(id=ExecId("s"), outcome="unknown", error=ErrorBody(code="x", message="gone")), "has ended: gone"),
    ],
)
def test_how_a_session_ended(end: ExecResult | None, how: str) -> None:
    assert how in shell_ended(end).message


def test_limits_are_named_only_where_they_fit() -> None:
    killed, failed, fine = Ended("signaled", 137, 9), Ended("exited", 1), Ended("exited", 0)
    late = Ended("timed_out", None)
    assert limit_of(killed, oom=True, pids=False, disk=False) == "oom"
    assert limit_of(failed, oom=True, pids=False, disk=False) == "oom", "a shell whose child was killed"
    assert limit_of(fine, oom=True, pids=False, disk=False) is None
    assert limit_of(failed, oom=False, pids=True, disk=True) == "pids"
    assert limit_of(failed, oom=False, pids=False, disk=True) == "disk_full"
    assert limit_of(killed, oom=False, pids=False, disk=False) is None
    assert limit_of(late, oom=False, pids=True, disk=False) == "pids", "a fork bomb never comes to its end"
    assert limit_of(late, oom=False, pids=False, disk=False) is None
    assert limit_of(fine, oom=False, pids=True, disk=True) is None
    assert suspicious(killed) and suspicious(late) and suspicious(failed) and not suspicious(fine)


def test_figures() -> None:
    said = done(GuestOutcome.EXITED, 0)
    result = result_of(ExecId("x"), said, ended(said), None, ((10, 2), (5, 0)))
    assert (result.stdout_bytes, result.stdout_dropped, result.stderr_bytes) == (10, 2, 5)
    assert (result.duration, result.cpu_user, result.cpu_system) == (1.5, 0.02, 0.01)
    assert (result.max_rss, result.background) == (1 << 20, 2)
