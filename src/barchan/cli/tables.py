"""Tables on stdout. Cells are data: no markup, no control characters."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from barchan.cli.text import plain

if TYPE_CHECKING:
    from rich.table import Table

_UNBOUNDED = 10_000
"""Columns when nobody looks: programs that read a table want each row on one line."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Columns whose head starts with `>` are right-aligned."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in columns:
        right = head.startswith(">")
        made.add_column(head.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    return made


def show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As `table`, printed."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(file=sys.stdout).print(table(columns, rows))
        return
    console = Console(file=io.StringIO(), width=_UNBOUNDED)
    with console.capture() as captured:
        console.print(table(columns, rows))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
