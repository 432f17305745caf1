"""From what the guest says of an ended command to its result: pure."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from barchan.errors import (
    BarchanError,
    FileDenied,
    FileFailure,
    FileMissing,
    FileNotDirectory,
    InvalidRequest,
    SandboxUnavailable,
    ShellBusy,
    ShellEnded,
    TerminalsTaken,
    UserNotFound,
)
from barchan.spec import ExecId, ExecResult, LimitName, Outcome
from barchan.wire.guest import Done, GuestOutcome

_NO_DIRECTORY: dict[int, type[FileFailure]] = {
    errno.ENOENT: FileMissing,
    errno.ENOTDIR: FileNotDirectory,
    errno.EACCES: FileDenied,
}
TERMINALS = 32
"""Of a sandbox at a time: what native/mounts.c gives its devpts."""
_SHORTAGES = {
    errno.ENOMEM: "its memory limit is reached, or the host's memory",
    errno.EAGAIN: "its limit of processes is reached",
    errno.EMFILE: "its first process has as many files open as it may",
    errno.ENFILE: "the host's limit of open files (fs.file-max) is reached",
}
"""They say nothing about the program, the user or the file that was asked for."""


class Ended(NamedTuple):
    """How it ended, without the figures."""

    outcome: Outcome
    exit_code: int | None
    signal: int | None = None
    error: BarchanError | None = None


def ended(done: Done, user: str = "", cwd: str = "") -> Ended:
    """`user` and `cwd` are what was asked for, for the error that names them."""
    if done.outcome == GuestOutcome.EXITED:
        return Ended("exited", done.code & 0xFF)
    if done.outcome == GuestOutcome.SIGNALED:
        return Ended("signaled", 128 + done.code, done.code)
    if done.outcome == GuestOutcome.TIMED_OUT:
        return Ended("timed_out", None)
    if done.outcome == GuestOutcome.CANCELLED:
        return Ended("cancelled", None)
    return _not_started(done.code, done.detail.decode(errors="replace"), user, cwd)


def _not_started(code: int, step: str, user: str, cwd: str) -> Ended:
    text = os.strerror(code).lower()
    if step == "tty" and code == errno.ENOSPC:
        return Ended("failed", None, error=no_terminal())
    if code in _SHORTAGES:
        return Ended("failed", None, error=shortage(code, step, "cannot start a process"))
    if step == "user":
        return Ended("failed", None, error=no_user(user))
    if step == "shell":
        return Ended("failed", None, error=_not_taken(code))
    if step == "cwd":
        cls = _NO_DIRECTORY.get(code, FileFailure)
        return Ended("failed", None, error=cls(f"working directory {cwd!r}: {text}", field="cwd", phase="cwd"))
    if step == "exec" and code in (errno.ENOENT, errno.ENOTDIR):
        return Ended("not_found", 127)
    if step == "exec" and code == errno.E2BIG:
        error = InvalidRequest("argv and env are longer than the kernel takes", field="argv", phase="exec")
        return Ended("failed", None, error=error)
    if step == "exec":
        return Ended("not_executable", 126)
    return Ended("failed", None, error=SandboxUnavailable(f"cannot start a process: {text}", phase=step))


def shortage(code: int, step: str, what: str) -> SandboxUnavailable:
    """`what` could not be done for want of something, in whichever step that showed."""
    return SandboxUnavailable(f"{what}: {os.strerror(code).lower()}", phase=step, hint=_SHORTAGES[code])


def is_shortage(code: int) -> bool:
    return code in _SHORTAGES


def no_terminal() -> TerminalsTaken:
    hint = f"end commands that have one; a sandbox has {TERMINALS}, all of a host share kernel.pty.max"
    return TerminalsTaken("no terminal is free in the sandbox", phase="tty", field="tty", hint=hint)


def _not_taken(code: int) -> BarchanError:
    """Why a shell session did not take a command line."""
    if code == errno.EBUSY:
        return ShellBusy("the shell session is running another command", hint="wait for it, or open another session")
    return shell_ended(None)


def shell_ended(session: ExecResult | None) -> ShellEnded:
    """What a command line gets that comes too late. `session` is the end of the session's own command, if known."""
    how = f": {_how(session)}" if session is not None else ""
    return ShellEnded(f"the shell session has ended{how}", hint="open another one")


def _how(session: ExecResult) -> str:
    if session.limit is not None:
        return f"the sandbox's limit {session.limit} was reached"
    if session.outcome == "signaled":
        return f"signal {session.signal}"
    if session.error is not None:
        return session.error.message
    return f"exit code {session.exit_code}" if session.outcome == "exited" else session.outcome.replace("_", " ")


def held(seconds: float) -> Ended:
    """A process that something inside stopped before it became the program."""
    error = SandboxUnavailable(
        f"it did not start within {seconds:g} s", phase="start", hint="something in the sandbox holds new processes up"
    )
    return Ended("failed", None, error=error)


def no_user(user: str) -> UserNotFound:
    hint = "its /etc/passwd and /etc/group are looked up; numbers such as 1000:1000 need no entry"
    return UserNotFound(f"the sandbox has no user {user!r}", field="user", hint=hint)


def suspicious(end: Ended) -> bool:
    """Whether a limit may be behind it, so that the counters are worth reading. One may also be why it took too long."""
    return end.exit_code != 0


def limit_of(end: Ended, *, oom: bool, pids: bool, disk: bool) -> LimitName | None:
    """Which limit a command ran into, given what happened in the sandbox while it ran."""
    if not suspicious(end):
        return None
    reached: tuple[tuple[LimitName, bool], ...] = (("oom", oom), ("pids", pids), ("disk_full", disk))
    return next((name for name, happened in reached if happened), None)


def result_of(
    id: ExecId, done: Done, end: Ended, limit: LimitName | None, streams: tuple[tuple[int, int], tuple[int, int]]
) -> ExecResult:
    """`streams`: total and dropped bytes of output and error output."""
    (out, out_dropped), (err, err_dropped) = streams
    return ExecResult(
        id=id,
        outcome=end.outcome,
        exit_code=end.exit_code,
        signal=end.signal,
        limit=limit,
        stdout_bytes=out,
        stderr_bytes=err,
        stdout_dropped=out_dropped,
        stderr_dropped=err_dropped,
        duration=done.wall_ns / 1e9,
        cpu_user=done.user_us / 1e6,
        cpu_system=done.system_us / 1e6,
        max_rss=done.max_rss,
        background=done.background,
        error=end.error.body() if end.error is not None else None,
    )
