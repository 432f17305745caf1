"""Progress bars on a terminal's stderr, for what takes a while. Everywhere else they are nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

AFTER = 0.5
"""Seconds; what is done by then shows no bar."""


@contextmanager
def bytes_bar() -> Iterator[Callable[[int, int | None], None] | None]:
    """A function to be told the bytes done, and all of them where that is known. None where nobody would see it."""
    with _shown("bytes") as bar:
        yield None if bar is None else bar.update


@contextmanager
def count_bar(total: int) -> Iterator[Callable[[int, int], None]]:
    """A function to be told how many are done, and how many could not be."""

    def tell(done: int, failed: int) -> None:
        if bar is not None:
            bar.update(done, total, f"{failed} failed" if failed else "")

    with _shown("count") as bar:
        yield tell


@contextmanager
def busy(what: str) -> Iterator[None]:
    """While something of unknown length blocks."""
    with _shown("busy", what) as bar:
        if bar is not None:
            bar.start(None)
        yield


@contextmanager
def _shown(kind: str, what: str = "") -> Iterator[_Bar | None]:
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(kind, what)
    try:
        yield bar
    finally:
        bar.close()


class _Bar:
    def __init__(self, kind: str, what: str) -> None:
        self._due = time.monotonic() + AFTER
        self._kind = kind
        self._what = what
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def update(self, done: int, total: int | None, what: str = "") -> None:
        if self._progress is None:
            if time.monotonic() < self._due:
                return
            self.start(total)
        assert self._progress is not None and self._task is not None
        # An upload counts names and lengths too.
        done = done if total is None else min(done, total)
        self._progress.update(self._task, completed=done, total=total, description=what)

    def start(self, total: int | None) -> None:
        self._progress = _progress(self._kind)
        self._task = self._progress.add_task(self._what, total=total)
        self._progress.start()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _progress(kind: str) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: dict[str, tuple[ProgressColumn, ...]] = {
        "bytes": (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()),
        "count": (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()),
        "busy": (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()),
    }
    return Progress(*columns[kind], console=Console(stderr=True), transient=kind == "busy")
