"""From the names of an environment to what they are now, for a lock file."""

from __future__ import annotations

from barchan.images import NO_CONFIG
from barchan.layers import refs
from barchan.layers.stack import compose
from barchan.layers.store import LayerStore
from barchan.locks import EnvironmentLock, LockedImage
from barchan.spec import EnvironmentRef


def lock(store: LayerStore, environment: EnvironmentRef) -> EnvironmentLock:
    """Raises what `stack.compose` does: what cannot be composed cannot be locked. Blocking."""
    compose(environment, store.resolve)
    base, *above = (_locked(store, name) for name in environment.names())
    workspace = above.pop(0) if environment.workspace else None
    return EnvironmentLock(base=base, workspace=workspace, toolkits=tuple(above))


def _locked(store: LayerStore, name: str) -> LockedImage:
    meant = store.catalog.follow(refs.parse(name))[-1]
    entry = None if meant.digest else store.catalog.find(meant)
    digest = entry.digest if entry else meant.digest
    stack = store.stack(digest)
    return LockedImage(
        name=name,
        reference=entry.reference if entry else digest,
        digest=digest,
        layers=stack.layers if stack else (digest,),
        config=stack.config if stack else NO_CONFIG,
    )
