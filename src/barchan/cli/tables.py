"""Tables on stdout. Cells are data: no markup, no control characters."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence

from barchan.cli.text import plain

_UNBOUNDED = 10_000
"""Columns when nobody looks: programs that read a table want each row on one line."""


def show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns whose head starts with `>` are right-aligned."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in columns:
        right = head.startswith(">")
        table.add_column(head.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    if sys.stdout.isatty():
        Console(file=sys.stdout).print(table)
        return
    console = Console(file=io.StringIO(), width=_UNBOUNDED)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
