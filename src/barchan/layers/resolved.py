"""Names that were resolved before, without reading the store again."""

from __future__ import annotations

import time

from barchan.layers import refs
from barchan.layers.store import Layer, LayerStore

SETTLED_NS = 1_000_000_000
"""A change within one tick of the file system's clock leaves no trace in its times: only what is older is remembered."""
MOST = 1024


class ResolvedNames:
    """`LayerStore.resolve`; a name costs one stat as long as none of its versions comes or goes."""

    def __init__(self, store: LayerStore) -> None:
        self._store = store
        self._known: dict[str, tuple[int, Layer]] = {}

    def __call__(self, ref: str) -> Layer:
        name = refs.parse(ref).name
        changed = self._store.catalog.changed(name) if name else 0
        known = self._known.get(ref)
        if known is not None and known[0] == changed:
            return known[1]
        layer = self._store.resolve(ref)
        if changed and time.time_ns() - changed > SETTLED_NS:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[ref] = (changed, layer)
        return layer
