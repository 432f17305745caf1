"""The least and the most of each limit of a sandbox."""

from __future__ import annotations

from barchan.errors import InvalidRequest
from barchan.sizes import size

_MOST = (1 << 62) - 1
"""Of any number of bytes."""
LIMITS: dict[str, tuple[float, float]] = {
    "memory": (16 << 20, _MOST),
    "cpus": (0.01, 1e5),
    "pids": (8, 1 << 22),
    "disk": (1 << 20, _MOST),
    "files": (64, 1 << 30),
}
"""The kernel takes no more of CPUs and pids."""


def check_limit(field: str, value: float) -> None:
    """Raises `InvalidRequest`."""
    low, high = LIMITS[field]
    if low <= value <= high:
        return
    shown = [_shown(one, high == _MOST) for one in (value, low, high)]
    hint = f"at least {shown[1]}" if high == _MOST else f"{shown[1]} to {shown[2]}"
    raise InvalidRequest(f"limits.{field}: {shown[0]} is out of range", field=f"limits.{field}", hint=hint)


def _shown(value: float, as_bytes: bool) -> str:
    try:
        return size(value) if as_bytes else f"{value:,.15g}"
    except OverflowError:
        return "such a number"
