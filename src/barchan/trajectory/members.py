"""Which sandboxes a segment has records of, in 8 bytes each: a full log holds those of millions that ended long ago."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Self


class Members:
    """May claim one more than was added, never misses one. Written by one thread, asked by any."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._sealed = array("q")

    @classmethod
    def sealed(cls, names: Iterable[str]) -> Self:
        made = cls()
        made._sealed = array("q", sorted({hash(name) for name in names}))
        return made

    def add(self, name: str) -> None:
        self._open.add(hash(name))

    def seal(self) -> None:
        """Nothing more is added: give back memory."""
        self._sealed = array("q", sorted({*self._open, *self._sealed}))
        self._open = set()

    def __contains__(self, name: str) -> bool:
        wanted = hash(name)
        if wanted in self._open:  # first: what `seal` takes from here is there by then
            return True
        sealed = self._sealed
        at = bisect_left(sealed, wanted)
        return at < len(sealed) and sealed[at] == wanted
