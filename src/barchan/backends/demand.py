"""How many sandboxes to hold ready, from how many were asked for lately. Pure: the caller gives the time.

A level counts requests and halves every `HALF_LIFE` seconds. What was asked for twice in a short while is expected again;
a steady stream drives its level to the most there may be, and a minute or two of silence takes it back to nothing.
"""

from __future__ import annotations

from typing import NamedTuple

HALF_LIFE = 15.0
SHAPES = 64
"""Shapes remembered; beyond it the one with the lowest level is forgotten."""


class Plan(NamedTuple):
    """What to hold: complete sandboxes by shape, and children that fit any."""

    ready: dict[bytes, int]
    parked: int


class Level:
    """A count that fades."""

    __slots__ = ("_at", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._at = 0.0

    def value(self, now: float) -> float:
        return float(self._value * 0.5 ** (max(now - self._at, 0.0) / HALF_LIFE))

    def add(self, now: float, most: float) -> None:
        self._value, self._at = min(self.value(now) + 1.0, most), now


class Demand:
    """`most`: what the pool may hold at best."""

    def __init__(self, most: int) -> None:
        self._most = float(most + 1)
        self._shapes: dict[bytes, Level] = {}
        self._others = Level()

    def note(self, shape: bytes, now: float, *, ready: bool) -> None:
        """A sandbox of this shape was asked for; `ready`: one was there."""
        if shape not in self._shapes and len(self._shapes) >= SHAPES:
            del self._shapes[min(self._shapes, key=lambda known: self._shapes[known].value(now))]
        self._shapes.setdefault(shape, Level()).add(now, self._most)
        if not ready:
            self._others.add(now, self._most)

    def plan(self, room: int, now: float) -> Plan:
        """What to hold in `room` places: the most wanted shapes first, then children for all others."""
        ready: dict[bytes, int] = {}
        room = max(room, 0)
        levels = sorted(((level.value(now), shape) for shape, level in self._shapes.items()), reverse=True)
        for level, shape in levels:
            wanted = min(_expected(level), room)
            if wanted <= 0:
                break
            ready[shape] = wanted
            room -= wanted
        return Plan(ready, min(_expected(self._others.value(now)), room))


def _expected(level: float) -> int:
    """Requests to prepare for: none after a single one."""
    return max(round(level) - 1, 0)
