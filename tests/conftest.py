"""What every test run shares: honest skips, and one place on disk for the servers that tests start.

A skip needs a reason. With CI set, a skip fails unless its reason is in ALLOWED_SKIPS: a host that promises to run
everything must not quietly run less.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from typing import TypeVar

import pytest

from tests import server

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

ALLOWED_SKIPS: tuple[str, ...] = ()
"""Regular expressions for reasons that are no loss even on a host that promises everything."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return refuse_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return refuse_skip(report)


def refuse_skip(report: Report) -> Report:
    """The report, or a failure in its place when the skip is not one we accept."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return report
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if reason in ("", "unconditional skip"):
        report.outcome, report.longrepr = "failed", "skipped without a reason"
    elif os.environ.get("CI") and not any(re.search(allowed, reason) for allowed in ALLOWED_SKIPS):
        report.outcome, report.longrepr = "failed", f"skipped, but CI promises to run everything: {reason}"
    return report


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts us in the background has us ignore ctrl-C, and so would all that is interrupted in a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_controller(config):
        server.choose_place()


def pytest_unconfigure(config: pytest.Config) -> None:
    if is_controller(config):
        server.end()


def is_controller(config: pytest.Config) -> bool:
    """Not one of xdist's workers."""
    return not hasattr(config, "workerinput")
