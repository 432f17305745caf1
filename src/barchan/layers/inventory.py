"""The layers of a store: who uses each, and since when nobody does."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from barchan.layers.gc import collect
from barchan.layers.store import LayerStore


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`size` in bytes. `names`: versions of names that reach it. `unused_since`: Unix seconds, None while one does."""

    digest: str
    size: int
    names: tuple[str, ...]
    mounted: bool
    unused_since: float | None = None


def inventory(store: LayerStore, mounted: Collection[str] = ()) -> tuple[LayerInfo, ...]:
    """By digest. `mounted`: the layers that are. Raises `LayerCorrupt` when a name or an image cannot be read."""
    sizes, users = store.sizes(), dict[str, set[str]]()
    for entry in store.catalog.entries():
        for digest in store.layers_of(entry.digest):
            users.setdefault(digest, set()).add(entry.reference)
    found = collect(store, grace=math.inf, dry_run=True)
    since = {one.digest: one.since for one in (*found.removed, *found.waiting)}
    return tuple(
        LayerInfo(
            digest=digest,
            size=size,
            names=tuple(sorted(users.get(digest, ()))),
            mounted=digest in mounted,
            unused_since=None if digest in users else since.get(digest),
        )
        for digest, size in sorted(sizes.items())
    )
