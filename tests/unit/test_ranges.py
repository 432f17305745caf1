"""Limits out of range, in words for people."""

from __future__ import annotations

import pytest

from barchan.errors import InvalidRequest
from barchan.ranges import LIMITS, check_limit


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("memory", 1, "limits.memory: 1 B is out of range (at least 16.0 MiB)"),
        ("disk", 1 << 70, "limits.disk: 1073741824.0 TiB is out of range (at least 1.0 MiB)"),
        ("pids", 5_000_000, "limits.pids: 5,000,000 is out of range (8 to 4,194,304)"),
        ("cpus", 0.001, "limits.cpus: 0.001 is out of range (0.01 to 100,000)"),
        ("memory", 10**400, "limits.memory: such a number is out of range (at least 16.0 MiB)"),
        ("pids", 10**400, "limits.pids: such a number is out of range (8 to 4,194,304)"),
    ],
)
def test_a_limit_out_of_range(field: str, value: float, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_limit(field, value)
    assert (str(caught.value), caught.value.field) == (text, f"limits.{field}")


@pytest.mark.parametrize("field", LIMITS)
def test_the_ends_of_each_range_are_in_it(field: str) -> None:
    for value in LIMITS[field]:
        check_limit(field, value)
