"""Exit codes as people know them from `docker run`."""

from __future__ import annotations

from typing import get_args

import pytest

from barchan.cli.exits import ending
from barchan.spec import ExecId, ExecResult, LimitName, Outcome


def result(outcome: Outcome, **fields: object) -> ExecResult:
    return ExecResult(id=ExecId("e"), outcome=outcome, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [0, 1, 125, 255])
def test_exited_is_the_programs_own_code(code: int) -> None:
    assert ending(result("exited", exit_code=code), b"x") == (code, (), None)


@pytest.mark.parametrize(
    ("outcome", "code", "note"),
    [
        ("timed_out", 124, "timed out"),
        ("not_executable", 126, "prog\\x1b: cannot be executed"),
        ("not_found", 127, "prog\\x1b: not found"),
    ],
)
def test_own_codes_are_explained(outcome: Outcome, code: int, note: str) -> None:
    end = ending(result(outcome), b"prog\x1b")
    assert end.code == code
    assert end.error is None
    assert note in end.notes[0]


def test_signaled() -> None:
    assert ending(result("signaled", signal=15, exit_code=143), b"x").code == 143


@pytest.mark.parametrize("limit", get_args(LimitName))
def test_limits_are_named(limit: LimitName) -> None:
    end = ending(result("signaled", signal=9, exit_code=137, limit=limit), b"x")
    assert end.code == 137
    assert end.notes[0].startswith(f"barchan: {limit}: ")


def test_unknown_is_an_error() -> None:
    end = ending(result("unknown"), b"x")
    assert end.code == 125
    assert end.error is not None and end.error.code == "outcome_unknown"


@pytest.mark.parametrize(("interrupted", "code"), [(2, 130), (15, 143), (None, 143)])
def test_cancelled(interrupted: int | None, code: int) -> None:
    assert ending(result("cancelled"), b"x", interrupted=interrupted).code == code


def test_truncation_is_said() -> None:
    end = ending(result("exited", exit_code=0, stdout_dropped=5, stderr_dropped=2), b"x")
    assert end.code == 0
    assert "7 bytes are missing" in end.notes[0]


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_every_outcome_has_a_code(outcome: Outcome) -> None:
    assert 0 <= ending(result(outcome, exit_code=0, signal=9), b"x").code <= 255
