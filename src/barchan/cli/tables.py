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
_GAP = 2
"""Between two columns."""


def fitted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, spare: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Without as many of the `spare` columns, the first named go first, as make each row fit one line of `width`."""
    kept = list(range(len(columns)))
    widest = [max(len(head.lstrip(">")), *(len(plain(row[at])) for row in rows), 0) for at, head in enumerate(columns)]
    for name in spare:
        if sum(widest[at] for at in kept) + _GAP * (len(kept) - 1) <= width:
            break
        kept = [at for at in kept if columns[at] != name]
    return [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Columns whose head starts with `>` are right-aligned; the first one, which names the row, is never folded."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in columns:
        right = head.startswith(">")
        first = not made.columns
        made.add_column(head.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=first)
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    return made


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str] = ()) -> None:
    """As `table`, printed; on a terminal as `fitted`."""
    from rich.console import Console

    if sys.stdout.isatty():
        screen = Console(file=sys.stdout)
        screen.print(table(*fitted(columns, rows, screen.width, spare)))
        return
    console = Console(file=io.StringIO(), width=_UNBOUNDED)
    with console.capture() as captured:
        console.print(table(columns, rows))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)
