"""Figures of a bench: how they are computed, and how they are printed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """One line of `--json`: name, value, unit, bar, ok. `value` None means that it was not measured, never that it was good."""

    name: str
    value: float | None
    unit: str
    bar: float | None = None
    sense: Literal["<=", ">="] = "<="
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """None when there is no bar."""
        if self.bar is None:
            return None
        if self.value is None:
            return False
        return self.value <= self.bar if self.sense == "<=" else self.value >= self.bar

    def json(self) -> str:
        value = None if self.value is None else float(f"{self.value:.4g}")
        bar = None if self.bar is None else float(f"{self.bar:.4g}")
        return json.dumps({"name": self.name, "value": value, "unit": self.unit, "bar": bar, "ok": self.ok})

    def text(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.4g} {self.unit}"
        bar = "" if self.bar is None else f"bar {self.sense} {self.bar:.4g}"
        mark = {True: "ok", False: "MISSED", None: ""}[self.ok]
        return f"{self.name:34} {value:>16}  {bar:16} {mark:7} {self.note}".rstrip()


@dataclass(frozen=True)
class Spread:
    """Of a sample, in the sample's own unit."""

    n: int
    p50: float
    p99: float
    low: float
    high: float

    def text(self) -> str:
        return f"n={self.n} p50={self.p50:.3g} p99={self.p99:.3g} min={self.low:.3g} max={self.high:.3g}"


def spread(sample: Sequence[float]) -> Spread:
    ordered = sorted(sample)
    return Spread(len(ordered), median(ordered), quantile(ordered, 0.99), ordered[0], ordered[-1])


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: a value that was really measured."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def show(title: str, figures: Sequence[Figure], notes: Sequence[str], as_json: bool) -> None:
    """Ratios first: they hold on another machine, absolute times do not."""
    ordered = sorted(figures, key=lambda figure: figure.unit != "x")
    if as_json:
        print("\n".join(figure.json() for figure in ordered))
        return
    print(title)
    print("\n".join(f"  {figure.text()}" for figure in ordered))
    print("\n".join(f"  # {note}" for note in notes))
