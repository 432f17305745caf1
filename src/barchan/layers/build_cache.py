"""Names of build steps: kept while builds use them, and then let go, so that their layers can go too.

<root>/names/build-<40 hex>/used    its time says when a build last asked for it
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from barchan.environments import EnvironmentRef
from barchan.layers import locking
from barchan.layers.catalog import Catalog
from barchan.layers.empty import empty_layer
from barchan.layers.store import LayerStore
from barchan.locks import EnvironmentLock
from barchan.names import BUILD_STEP, SCRATCH

KEEP = 7 * 86400.0
"""Seconds after its last use."""
MOST = 2000
"""Names; what was used longest ago goes first."""


class Kept(NamedTuple):
    """A step's name: when it was used, in Unix seconds, and the layers that it stands for, bottom first."""

    used: float
    layers: tuple[str, ...]


def lock(store: LayerStore, environment: EnvironmentRef) -> EnvironmentLock:
    """What names mean now: by this builds ask what of their steps there is. Raises what `locking.lock` does."""
    if environment.base == SCRATCH:
        empty_layer(store)
    found = locking.lock(store, environment)
    use(store.catalog, environment.base)
    return found


def use(catalog: Catalog, name: str) -> None:
    """Note that a build asked for it. Other names are no matter."""
    if BUILD_STEP.fullmatch(name):
        mark = _mark(catalog, name)
        mark.touch(0o600)
        os.utime(mark)


def expired(steps: Mapping[str, Kept], now: float, keep: float = KEEP, most: int = MOST) -> Collection[str]:
    """Pure. A step below one that is kept is kept with it: its layers are there anyhow, and the next change may begin above it."""
    newest = sorted(steps, key=lambda name: steps[name].used, reverse=True)[:most]
    recent = [steps[name].layers for name in newest if now - steps[name].used < keep]
    alive = {layers[:size] for layers in recent for size in range(1, len(layers) + 1)}
    return {name for name, step in steps.items() if step.layers not in alive}


def expire(store: LayerStore, now: float | None = None) -> tuple[str, ...]:
    """Forget names that no build has used for long; `gc` then takes their layers. Returns them."""
    now = time.time() if now is None else now
    gone = expired(_steps(store), now)
    for name in gone:
        with store.catalog.locked(name):
            for version in store.catalog.versions(name):
                store.catalog.forget(name, version)
            _mark(store.catalog, name).unlink(missing_ok=True)
    return tuple(sorted(gone))


def _steps(store: LayerStore) -> dict[str, Kept]:
    found = {}
    for entry in store.catalog.entries():
        if BUILD_STEP.fullmatch(entry.name):
            mark = _mark(store.catalog, entry.name)
            used = mark.stat().st_mtime if mark.exists() else entry.created
            found[entry.name] = Kept(max(used, entry.created), store.layers_of(entry.digest))
    return found


def _mark(catalog: Catalog, name: str) -> Path:
    return catalog.root / name / "used"
