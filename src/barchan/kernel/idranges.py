"""Ranges of host user ids, each held by one sandbox at a time, whichever installation on the host it belongs to.

    DIRECTORY/<slot>                    link to `<instance>/<sandbox>`: made atomically by whoever takes the range
    DIRECTORY/of/<instance>/<sandbox>   link to `<slot>`, so that a range is given back by its sandbox's id alone

The directory lies below /run: a reboot ends all sandboxes and empties it.
"""

from __future__ import annotations

import os
from pathlib import Path

from barchan.errors import CreateFailed


class IdRanges:
    """The ranges of one installation. Only one process per installation uses it."""

    def __init__(self, directory: Path, instance: str, slots: int) -> None:
        self._directory = directory
        self._instance = instance
        self._own = directory / "of" / instance
        self.slots = slots
        self._next = 0

    def prepare(self) -> None:
        """Make the directories, and give back what a killed process had only half taken."""
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in self._directory.iterdir():
            if entry.is_symlink():
                instance, _, sandbox = os.readlink(entry).partition("/")
                if instance == self._instance and self._slot_of(sandbox) != int(entry.name):
                    entry.unlink()

    def claim(self, sandbox: str) -> int:
        """A slot nobody holds. `CreateFailed` when there is none."""
        for step in range(self.slots):
            slot = (self._next + step) % self.slots
            try:
                os.symlink(f"{self._instance}/{sandbox}", self._directory / str(slot))
            except FileExistsError:
                continue
            os.symlink(str(slot), self._own / sandbox)
            self._next = slot + 1
            return slot
        raise CreateFailed(
            f"all {self.slots} ranges of host user ids are taken", phase="ids", hint="stop sandboxes on this host"
        )

    def release(self, sandbox: str) -> None:
        """Idempotent. One interrupted half-way may find the slot with its next holder, and leaves it there."""
        slot = self._slot_of(sandbox)
        if slot is not None:
            if self._holder(slot) == f"{self._instance}/{sandbox}":
                (self._directory / str(slot)).unlink(missing_ok=True)
            (self._own / sandbox).unlink(missing_ok=True)

    def list(self) -> frozenset[str]:
        """Sandboxes of this installation that hold a range."""
        return frozenset(entry.name for entry in self._own.iterdir())

    def close(self) -> None:
        """Nothing is held any more: remove what is this installation's. Idempotent."""
        if self._own.is_dir():
            self._own.rmdir()

    def _holder(self, slot: int) -> str:
        try:
            return os.readlink(self._directory / str(slot))
        except FileNotFoundError:
            return ""

    def _slot_of(self, sandbox: str) -> int | None:
        try:
            return int(os.readlink(self._own / sandbox))
        except FileNotFoundError:
            return None
