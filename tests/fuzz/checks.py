"""What must hold for every target."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.campaign import SEEDED_SECONDS, coverage, finds_seeded_bug, fuzz, lacking, summary
from tests.fuzz.targets import TARGETS, Target


def runnable(name: str, place: Path) -> Target:
    target = TARGETS[name]
    if reason := lacking(target, place):
        pytest.skip(reason)
    return target


def nothing_breaks(name: str, place: Path, seconds: int) -> None:
    target = runnable(name, place)
    target.build(place)
    output = fuzz(target, place, seconds)
    reached = coverage(target, place, target.corpus)
    print(f"{name}: {seconds} s, {summary(output)}; kept corpus: {reached}")
    assert reached.percent >= target.floor, f"the kept corpus reaches only {reached}"


def seeded_bug_is_found(name: str, place: Path) -> None:
    assert finds_seeded_bug(runnable(name, place), place), f"not found in {SEEDED_SECONDS} s"
