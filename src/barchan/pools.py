"""What a node says about the sandboxes that it makes ahead of requests."""

from __future__ import annotations

import msgspec


class PoolInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node makes ahead of requests. Counts are since its agent started."""

    ready: int = 0
    """Complete sandboxes held."""
    parked: int = 0
    """Children held that wait for their files."""
    hits: int = 0
    """Creations that took a complete one,"""
    parked_hits: int = 0
    """that took a parked one,"""
    misses: int = 0
    """and that found none."""
    refills: int = 0
    refill_ms: float = 0.0
    """Mean time that making one ahead took."""
    discarded: int = 0
    """Made ahead and removed unused."""
    spawn_ms: float = 0.0
    """Mean time of the spawner for one container, whether made ahead or not,"""
    attach_ms: float = 0.0
    """and what of it went into joining the control groups."""
    removing: int = 0
    """Ended ones of which cgroups and files are still being removed."""
