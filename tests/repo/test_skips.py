"""The rule about skips in tests/conftest.py."""

from __future__ import annotations

import pytest

from tests import conftest


def skipped(reason: str) -> pytest.TestReport:
    place = ("test_it.py", 1, f"Skipped: {reason}")
    return pytest.TestReport("test_it.py::test_it", ("test_it.py", 1, "test_it"), {}, "skipped", place, "call")


@pytest.mark.parametrize(("ci", "outcome"), [("", "skipped"), ("true", "failed")])
def test_a_promising_host_must_not_skip(monkeypatch: pytest.MonkeyPatch, ci: str, outcome: str) -> None:
    monkeypatch.setenv("CI", ci)
    report = conftest.refuse_skip(skipped("no such kernel feature"))
    assert report.outcome == outcome
    assert "no such kernel feature" in str(report.longrepr)


def test_an_allowed_reason_may_skip_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(conftest, "ALLOWED_SKIPS", ("^no gravity",))
    assert conftest.refuse_skip(skipped("no gravity here")).skipped


def test_a_skip_needs_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert conftest.refuse_skip(skipped("unconditional skip")).failed


def test_an_expected_failure_is_no_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    report = skipped("")
    report.wasxfail = "known"
    assert conftest.refuse_skip(report).skipped
