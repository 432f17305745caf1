"""How much room layers take, and for whom."""

from __future__ import annotations

from collections import Counter

import msgspec

from barchan.layers import refs
from barchan.layers.store import LayerStore


class NameUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Of one version of a name, bytes."""

    name: str
    total: int
    """Of all layers that it reaches."""
    own: int
    """Of those that no other name reaches: what its removal gives back."""
    layers: int


class StoreUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes."""

    names: tuple[NameUsage, ...]
    stored: int
    unused: int
    """Of layers that no name reaches."""


def usage(store: LayerStore) -> StoreUsage:
    """Raises `LayerCorrupt` when a name or an image cannot be read."""
    sizes = store.sizes()
    reached = {entry.reference: set(store.layers_of(entry.digest)) for entry in store.catalog.entries()}
    aliased = {alias: refs.parse(target).digest for alias, target in store.catalog.aliases().items()}
    reached |= {alias: set(store.layers_of(digest)) for alias, digest in aliased.items() if digest}
    users = Counter(digest for layers in reached.values() for digest in layers)
    names = tuple(
        NameUsage(
            name=name,
            total=sum(sizes.get(digest, 0) for digest in layers),
            own=sum(sizes.get(digest, 0) for digest in layers if users[digest] == 1),
            layers=len(layers),
        )
        for name, layers in sorted(reached.items())
    )
    unused = sum(size for digest, size in sizes.items() if digest not in users)
    return StoreUsage(names=names, stored=sum(sizes.values()), unused=unused)
