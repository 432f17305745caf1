"""Ranges of host user ids, each held by one sandbox at a time, whichever installation on the host it belongs to.

    DIRECTORY/<slot>    link to `<instance>/<place>`: made atomically by whoever takes the range (native/places.c)

The directory lies below /run: a reboot ends all sandboxes and empties it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from barchan.errors import CreateFailed


class IdRanges:
    """The ranges of one installation. Only one agent per installation uses it."""

    def __init__(self, directory: Path, instance: str, slots: int) -> None:
        self.directory = directory
        self.instance = instance
        self.slots = slots
        self._next = 0

    def prepare(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def claim(self, place: str) -> int:
        """A slot nobody holds. `CreateFailed` when there is none."""
        for step in range(self.slots):
            slot = (self._next + step) % self.slots
            try:
                os.symlink(f"{self.instance}/{place}", self.directory / str(slot))
            except FileExistsError:
                continue
            self._next = slot + 1
            return slot
        raise CreateFailed(
            f"all {self.slots} ranges of host user ids are taken", phase="ids", hint="stop sandboxes on this host"
        )

    def release(self, place: str) -> None:
        """Idempotent. Looks at every range that is held."""
        for slot, holder in self._held():
            if holder == place:
                slot.unlink(missing_ok=True)

    def list(self) -> frozenset[str]:
        """Places of this installation that hold a range."""
        return frozenset(place for _, place in self._held())

    def held(self) -> frozenset[int]:
        """Slots that places of this installation have."""
        return frozenset(int(path.name) for path, _ in self._held())

    def _held(self) -> Iterator[tuple[Path, str]]:
        for entry in os.scandir(self.directory):
            try:
                instance, _, place = os.readlink(entry.path).partition("/")
            except OSError:  # given back meanwhile, or no link
                continue
            if instance == self.instance:
                yield Path(entry.path), place
