"""Names that were resolved before, without reading the store again."""

from __future__ import annotations

import time

from barchan.layers import refs
from barchan.layers.store import Layer, LayerStore

SETTLED_NS = 1_000_000_000
"""A change within one tick of the file system's clock leaves no trace in its times: only what is older is remembered."""
MOST = 1024


class ResolvedNames:
    """`LayerStore.resolve`; a name, and each alias on the way, costs one stat as long as nothing of it comes or goes."""

    def __init__(self, store: LayerStore) -> None:
        self._store = store
        self._known: dict[str, tuple[dict[str, int], Layer]] = {}

    def __call__(self, ref: str) -> Layer:
        changed = self._store.catalog.changed
        known = self._known.get(ref)
        if known is not None and all(changed(name) == at for name, at in known[0].items()):
            return known[1]
        seen = {meant.name: changed(meant.name) for meant in self._store.catalog.follow(refs.parse(ref)) if meant.name}
        layer = self._store.resolve(ref)
        if not layer.name:
            return layer  # a digest has no file of its own whose time would tell that it is gone
        if all(seen.values()) and time.time_ns() - max(seen.values()) > SETTLED_NS:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[ref] = (seen, layer)
        return layer
