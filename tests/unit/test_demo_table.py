"""The demo's table where nobody watches it grow."""

from __future__ import annotations

import io

from rich.console import Console

from examples.swe.agents import SIXTEEN
from examples.swe_demo import Row, shown


def test_one_failure_of_all_is_said_once_and_whole() -> None:
    output = io.StringIO()
    failure = "node_storage_full: " + "no space " * 30
    rows = [Row(variant, failure=failure) for variant in SIXTEEN]
    with shown(Console(file=output, width=120), rows):
        pass
    assert output.getvalue().count("node_storage_full") == 1
    assert output.getvalue().endswith(f"all of them: {failure}\n")


def test_failures_that_differ_stand_in_their_rows() -> None:
    output = io.StringIO()
    rows = [Row(variant) for variant in SIXTEEN]
    rows[0].failure, rows[1].failure = "a: x", "b: y"
    with shown(Console(file=output, width=120), rows):
        pass
    assert "a: x" in output.getvalue() and "b: y" in output.getvalue() and "all of them" not in output.getvalue()


def test_a_piped_table_is_printed_once_and_ends_its_last_line() -> None:
    output = io.StringIO()
    with shown(Console(file=output, width=120), [Row(variant) for variant in SIXTEEN]):
        assert output.getvalue() == ""
    assert output.getvalue().endswith("\n")
    assert output.getvalue().count("outlives its time-to-live") == 1


def test_the_time_to_ready_is_explained() -> None:
    output = io.StringIO()
    with shown(Console(file=output, width=200), [Row(variant) for variant in SIXTEEN]):
        pass
    assert "has just started" in output.getvalue()
