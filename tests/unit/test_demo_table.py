"""The demo's table where nobody watches it grow."""

from __future__ import annotations

import io

from rich.console import Console

from examples.swe.agents import SIXTEEN
from examples.swe_demo import Row, shown


def test_a_piped_table_is_printed_once_and_ends_its_last_line() -> None:
    output = io.StringIO()
    with shown(Console(file=output, width=120), [Row(variant) for variant in SIXTEEN]):
        assert output.getvalue() == ""
    assert output.getvalue().endswith("\n")
    assert output.getvalue().count("outlives its time-to-live") == 1
