"""Layers that nothing reaches any more are removed, once they have been so for a while.

What reaches a layer: a version of a name, directly or through an image of several layers; for a node agent also a sandbox, which may be packed. The time is there for those who have just resolved a name and are about to use it, on this host or on
another that shares the store: a layer that somebody reaches in between counts from the start again.

    <store>/unused/<hex>    its time says since when nobody reaches this layer
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import msgspec

from barchan.layers import refs
from barchan.layers.catalog import flock
from barchan.layers.store import LayerStore

GRACE = 600.0
"""Seconds. Longer than any creation takes from name to mount."""


class Unused(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that nothing reaches. `since` in Unix seconds, `size` in bytes."""

    digest: str
    size: int
    since: float


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection removed, and what waits until its time has come."""

    removed: tuple[Unused, ...] = ()
    waiting: tuple[Unused, ...] = ()

    @property
    def freed(self) -> int:
        """Bytes."""
        return sum(layer.size for layer in self.removed)


class Plan(NamedTuple):
    """Digests, by what is to be done with them."""

    mark: AbstractSet[str]
    unmark: AbstractSet[str]
    remove: AbstractSet[str]


def plan(
    there: Collection[str], reached: Collection[str], since: Mapping[str, float], now: float, grace: float
) -> Plan:
    """Pure. `since`: of those that were found unused before, when that was first."""
    unused = set(there) - set(reached)
    # A clock that was set back must not make a mark of the future protect for ever.
    due = {digest for digest in unused if digest in since and not 0 <= now - since[digest] < grace}
    fresh = unused - set(since)
    if grace <= 0:
        due, fresh = unused, set()
    return Plan(mark=fresh, unmark=set(since) - unused, remove=due)


def collect(
    store: LayerStore,
    *,
    grace: float = GRACE,
    dry_run: bool = False,
    now: float | None = None,
    held: AbstractSet[str] = frozenset(),
) -> Collected:
    """Remove what nobody has reached for `grace` seconds, and note what nobody reaches. `held`: layers that somebody reaches without a name.

    With `dry_run` nothing is changed. Raises `LayerCorrupt` when a name or an image cannot be read: then nothing is removed.
    """
    now = time.time() if now is None else now
    with flock(store.root / "lock", fcntl.LOCK_EX):
        sizes = store.sizes()
        since = _marks(store)
        todo = plan(sizes, store.reached() | held, since, now, grace)
        if not dry_run:
            _carry_out(store, todo, now)
    waiting = {**{digest: now for digest in todo.mark}, **since}
    return Collected(
        removed=_described(todo.remove, sizes, waiting, now),
        waiting=_described(set(waiting) - todo.remove - todo.unmark, sizes, waiting, now),
    )


def _described(
    digests: AbstractSet[str], sizes: Mapping[str, int], since: Mapping[str, float], now: float
) -> tuple[Unused, ...]:
    return tuple(
        Unused(digest=digest, size=sizes.get(digest, 0), since=since.get(digest, now)) for digest in sorted(digests)
    )


def _marks(store: LayerStore) -> dict[str, float]:
    return {f"sha256:{mark.name}": mark.stat().st_mtime for mark in store.unused.iterdir()}


def _carry_out(store: LayerStore, todo: Plan, now: float) -> None:
    for digest in todo.mark:
        mark = _mark(store, digest)
        mark.touch(0o600)
        os.utime(mark, (now, now))
    for digest in todo.remove:
        store.discard(digest)
    for digest in todo.unmark | todo.remove:
        _mark(store, digest).unlink(missing_ok=True)
    store.discard_leftovers()


def _mark(store: LayerStore, digest: str) -> Path:
    return store.unused / refs.hex_of(digest)
