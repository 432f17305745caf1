"""How a command's result becomes this program's exit code, as with `docker run`. Pure."""

from __future__ import annotations

import signal
from typing import NamedTuple

from barchan.cli.text import plain
from barchan.errors import BarchanError, OutcomeUnknown
from barchan.spec import ExecResult

TIMED_OUT, PLATFORM, NOT_EXECUTABLE, NOT_FOUND = 124, 125, 126, 127
NEVER_RAN = ("not_found", "not_executable")
OUTPUT_GONE = 128 + signal.SIGPIPE

_LIMITS = {
    "oom": "the sandbox's memory limit was reached",
    "pids": "the sandbox's limit of processes was reached",
    "disk_full": "the sandbox's disk limit was reached",
}


class Ending(NamedTuple):
    """`notes` go to stderr, one line each; `error` is shown instead of a result."""

    code: int
    notes: tuple[str, ...] = ()
    error: BarchanError | None = None


def ending(result: ExecResult, program: bytes, *, interrupted: int | None = None) -> Ending:
    """`interrupted` is the signal for which this program gave up, if it did."""
    code, note = _by_outcome(result, program, interrupted)
    if code is None:
        return Ending(PLATFORM, error=OutcomeUnknown(note, hint="the node lost the command while it ran"))
    notes = [f"barchan: {note}"] if note else []
    if result.limit is not None:
        notes.append(f"barchan: {result.limit}: {_LIMITS[result.limit]}")
    if dropped := result.stdout_dropped + result.stderr_dropped:
        notes.append(f"barchan: output was cut, {dropped} bytes are missing at its end (see --output-limit)")
    return Ending(code, tuple(notes))


def _by_outcome(result: ExecResult, program: bytes, interrupted: int | None) -> tuple[int | None, str]:
    match result.outcome:
        case "exited":
            return result.exit_code or 0, ""
        case "signaled":
            return 128 + (result.signal or 0), ""
        case "timed_out":
            return TIMED_OUT, f"timed out after {result.duration:.1f} s"
        case "cancelled":
            return 128 + (interrupted or signal.SIGTERM), "cancelled"
        case "not_found":
            return NOT_FOUND, f"{plain(program)}: not found in the sandbox"
        case "not_executable":
            return NOT_EXECUTABLE, f"{plain(program)}: cannot be executed"
        case _:
            return None, "nobody knows how the command ended"
