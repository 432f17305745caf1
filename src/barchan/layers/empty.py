"""The layer with nothing in it, which builds `FROM scratch` begin with. Made when it is first wanted,
and the same everywhere."""

from __future__ import annotations

from barchan.errors import EnvironmentNotFound
from barchan.kernel import directories
from barchan.layers import erofs
from barchan.layers.store import Layer, LayerStore
from barchan.names import SCRATCH


def empty_layer(store: LayerStore) -> Layer:
    """Raises `FeatureMissing`, `CreateFailed`, `NodeStorageFull`."""
    try:
        return store.resolve(SCRATCH)
    except EnvironmentNotFound:
        pass
    with store.temporary() as work:
        directories.make(work / "tree", 0o755)
        erofs.build(work / "tree", work / "layer", epoch=0)
        return store.add(work / "layer", SCRATCH, source="scratch", kind="build")
