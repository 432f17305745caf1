"""Progress bars, on a terminal."""

from __future__ import annotations

import sys

from tests.terminals import LocalTerminal

COUNT = """
from barchan.cli import progress
progress.AFTER = 0
with progress.count_bar(3) as tell:
    tell(0, 1)
    tell(1, 2)
"""


def test_what_failed_is_counted_apart_from_what_is_done() -> None:
    with LocalTerminal([sys.executable, "-c", COUNT]) as terminal:
        shown = terminal.until(b"2 failed")
        assert b"1/3" in shown and b"3/3" not in shown
