"""The names of a segment cost little and none is forgotten."""

from __future__ import annotations

import sys

from barchan.trajectory.members import Members

NAMES = [f"n1-{number:020d}" for number in range(20_000)]


def test_no_name_is_missed_before_or_after_the_seal() -> None:
    members = Members()
    for name in NAMES[::2]:
        members.add(name)
    assert all(name in members for name in NAMES[::2])
    assert not any(name in members for name in NAMES[1::2])
    members.seal()
    members.seal()
    assert all(name in members for name in NAMES[::2])
    assert not any(name in members for name in NAMES[1::2])


def test_a_sealed_name_costs_eight_bytes() -> None:
    members = Members()
    for name in NAMES:
        members.add(name)
    members.seal()
    assert sum(sys.getsizeof(part) for part in vars(members).values()) < 8.5 * len(NAMES)
