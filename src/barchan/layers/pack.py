"""A new layer from what was changed in a sandbox."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from barchan.kernel import directories, syscalls
from barchan.layers import erofs
from barchan.layers.flatten import Flattening
from barchan.layers.lower import DIRECTORY, Lower
from barchan.layers.scrub import Policy
from barchan.layers.store import Layer, LayerStore
from barchan.names import check_name

_SPARE = 64 << 20


class PackReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer was made of. `size` is the bytes of its files, `left_out` counts by rule of the policy, with `sockets` and
    `devices` beside them; a directory that was left out counts once. `renamed` directories of the layers below and
    `completed` files, of which only attributes had changed, were copied from there."""

    layer: Layer
    entries: int
    size: int
    left_out: Mapping[str, int]
    renamed: int = 0
    completed: int = 0


def pack(
    store: LayerStore,
    upper: Path | int,
    name: str,
    *,
    below: Lower,
    stage: Path | None = None,
    policy: Policy = Policy(),  # noqa: B008
    source: str = "",
    kind: str = "pack_diff",
) -> PackReport:
    """Make the upper directory of a sandbox's overlay the next version of `name`.

    `upper` is in a read-only snapshot: what changes meanwhile would be packed torn. `below` are all layers of that
    overlay, not mapped to other ids, their descriptors open for reading. `stage` is an empty directory of the caller's on the
    file system of `upper` (`Scratch.frozen`): contents are shared there and not copied, and small files are made much faster
    than on the disk of the store, where they are made without it. The layer on top of them shows what the sandbox saw, except for what `policy` leaves
    out: there the layers below show through. The same changes again are the same layer.

    Raises `InvalidRequest` naming a file that no layer may hold, `NodeStorageFull`, `FeatureMissing`, `CreateFailed`;
    nothing half-made stays behind.
    """
    check_name(name, "name")
    with store.temporary() as work, _directory(upper) as taken:
        tree, image = stage or work / "tree", work / "image"
        directories.make(tree, 0o755)
        with _directory(tree) as target:
            flat = Flattening(taken, target, below, policy, shutil.disk_usage(work).free - _SPARE)
            flat.run()
        erofs.build(tree, image, exact=True)
        layer = store.add(image, name, source=source, kind=kind)
    left_out = dict(sorted(flat.left_out.items()))
    return PackReport(
        layer=layer,
        entries=flat.entries,
        size=flat.size,
        left_out=left_out,
        renamed=flat.renamed,
        completed=flat.completed,
    )


@contextmanager
def _directory(at: Path | int) -> Iterator[int]:
    """Open for reading. Of a descriptor another one, which has its own position."""
    fd = os.open(at, DIRECTORY) if isinstance(at, Path) else syscalls.open_beneath(b".", os.O_DIRECTORY, dir_fd=at)
    try:
        yield fd
    finally:
        os.close(fd)
