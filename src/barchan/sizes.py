"""How messages write numbers for people."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes: `512.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
