"""Sandbox ids, and what a node tells of its sandboxes."""

from __future__ import annotations

import secrets
import time

from barchan.environments import PullProgress
from barchan.node.registry import SandboxRow
from barchan.spec import SandboxId, SandboxInfo

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [high + low for high in _ALPHABET for low in _ALPHABET]


def new_id(node: str) -> str:
    """`<node>-<unique>`: 48 bits of milliseconds and 50 random ones, so that ids sort by time."""
    number = (time.time_ns() // 1_000_000 & (1 << 50) - 1) << 50 | secrets.randbits(50)
    digits = "".join([_PAIRS[number >> shift & 1023] for shift in range(90, -1, -10)])
    return f"{node}-{digits}"


def describe(row: SandboxRow, pulling: PullProgress | None = None) -> SandboxInfo:
    return SandboxInfo(
        id=SandboxId(row.id),
        state=row.state,
        backend=row.spec.backend,
        environment=row.spec.environment,
        limits=row.spec.limits,
        labels=row.spec.labels,
        created=row.created,
        last_used=row.last_used,
        expires=row.expires,
        pid=row.pid if row.state == "ready" else 0,
        ready_ms=row.ready_ms,
        reason=row.reason,
        ended=row.ended,
        pulling=pulling,
    )


def beginning(argv: tuple[bytes, ...], most: int) -> tuple[bytes, ...]:
    """Arguments for looking at: `most` bytes of them, each counted with its end."""
    kept: list[bytes] = []
    for item in argv:
        kept.append(item[:most])
        most -= len(kept[-1]) + 1
        if most <= 0:
            break
    return tuple(kept)
