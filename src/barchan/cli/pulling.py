"""What a node says of an image that it fetches, on stderr: bars on a terminal, lines elsewhere. Nothing for what is done at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from barchan.cli.text import plain

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from barchan.cli.session import Session
    from barchan.environments import PullProgress, Told

AFTER = 1.0
"""Seconds; of what is done by then nothing is said."""


@contextmanager
def pull_bars(session: Session) -> Iterator[Told]:
    """A function to be told. With --json each word is a document on stderr."""
    bars = _Bars() if sys.stderr.isatty() and not session.json else None
    try:
        yield _Lines(session).tell if bars is None else bars.tell
    finally:
        if bars is not None:
            bars.close()


class _Lines:
    """One for each step of each layer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._due = time.monotonic() + AFTER
        self._said: dict[tuple[str, str], tuple[str, int]] = {}

    def tell(self, progress: PullProgress) -> None:
        step = (progress.phase, progress.layer)
        if time.monotonic() < self._due or self._said.get((progress.node, progress.image)) == step:
            return
        self._said[progress.node, progress.image] = step
        if self._session.json:
            from barchan.cli.session import to_json

            self._session.note(to_json({"event": "pull", "progress": progress}).decode())
        else:
            self._session.note(plain(f"barchan: {progress}"))


class _Bars:
    """One for each image and node."""

    def __init__(self) -> None:
        self._due = time.monotonic() + AFTER
        self._progress: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def tell(self, progress: PullProgress) -> None:
        if time.monotonic() < self._due:
            return
        if self._progress is None:
            self._progress = _progress()
        key = (progress.node, progress.image)
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(_described(progress), total=None)
        total = progress.total or None
        self._progress.update(self._tasks[key], description=_described(progress), completed=progress.done, total=total)
        self._progress.start()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _described(progress: PullProgress) -> str:
    from rich.markup import escape

    at = f" {progress.layer}/{progress.layers}" if progress.layers else ""
    return escape(plain(f"{progress.image.removeprefix('docker://')}  {progress.phase}{at}"))


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
    )  # fmt: skip
    return Progress(*columns, console=Console(stderr=True), transient=True)
