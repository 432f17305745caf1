"""Set-up as one list, undone in reverse.

A step does one thing and knows how to undo it. `undo` must be safe when `do` never ran, ran half-way, or was already
undone, because it also cleans up after a crash, by the id alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from barchan.errors import BarchanError, CreateFailed

D_contra = TypeVar("D_contra", contravariant=True)
T = TypeVar("T")


class Step(Protocol[D_contra]):
    name: str
    """The phase that a failure names."""

    def do(self, draft: D_contra) -> None: ...

    def undo(self, id: str) -> None: ...


class Steps(Generic[T]):
    """An ordered list of steps over one kind of draft."""

    def __init__(self, steps: Sequence[Step[T]]) -> None:
        self._steps = tuple(steps)

    def do(self, draft: T) -> None:
        """Run all. A failure is a typed error that names its step; undoing is the caller's, by `undo`."""
        for step in self._steps:
            try:
                step.do(draft)
            except BarchanError as error:
                error.phase = error.phase or step.name
                raise
            except OSError as error:
                raise CreateFailed(f"{step.name}: {error.strerror or error}", phase=step.name) from error

    def undo(self, id: str) -> None:
        """Undo all in reverse. Every step is tried; the first failure is raised at the end."""
        failures: list[Exception] = []
        for step in reversed(self._steps):
            try:
                step.undo(id)
            except (BarchanError, OSError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
