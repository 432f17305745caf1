"""A new layer from what was changed in a sandbox."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from barchan.images import NO_CONFIG, ImageConfig
from barchan.kernel import directories, syscalls
from barchan.layers import content, erofs
from barchan.layers.catalog import NameEntry, Provenance
from barchan.layers.flatten import Flattening
from barchan.layers.lower import DIRECTORY, Lower
from barchan.layers.scrub import Policy
from barchan.layers.store import Layer, LayerStore, StackFile
from barchan.names import check_name
from barchan.packing import PackedLayer

KIND = "pack_diff"
_SPARE = 64 << 20


class Whole(NamedTuple):
    """An image that the changes complete."""

    below: tuple[str, ...]
    """Digests of its other layers, bottom first."""
    config: ImageConfig = NO_CONFIG


class PackReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer was made of. `size` is the bytes of its files, `left_out` counts by rule of the policy, with `sockets` and
    `devices` beside them; a directory that was left out counts once. `renamed` directories of the layers below and
    `completed` files, of which only attributes had changed, were copied from there."""

    layer: Layer
    entry: NameEntry
    """Of the name that it got."""
    layers: int = 1
    """For which that name stands."""
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
    kind: str = KIND,
    whole: Whole | None = None,
    provenance: Provenance | None = None,
) -> PackReport:
    """Make the upper directory of a sandbox's overlay the next version of `name`, or with `whole` that of an image.

    `upper` is in a read-only snapshot: what changes meanwhile would be packed torn. `below` are all layers of that
    overlay, not mapped to other ids, their descriptors open for reading. `stage` is an empty directory of the caller's on the
    file system of `upper` (`Scratch.frozen`): contents are shared there and not copied, and small files are made much faster
    than on the disk of the store, where they are made without it. The layer on top of them shows what the sandbox saw, except for what `policy` leaves
    out: there the layers below show through. The same changes again are the same layer. `provenance` is completed with what was found.

    Raises `InvalidRequest` naming a file that no layer may hold, `NodeStorageFull`, `FeatureMissing`, `CreateFailed`;
    nothing half-made stays behind.
    """
    check_name(name, "name")
    with store.temporary() as work, _directory(upper) as taken:
        tree, layer = stage or work / "tree", work / "layer"
        directories.make(tree, 0o755)
        with _directory(tree) as target:
            flat = Flattening(taken, target, below, policy, shutil.disk_usage(work).free - _SPARE)
            flat.run()
        erofs.build(tree, layer, exact=True)
        made = _made(flat, provenance)
        if whole and flat.nothing:
            added, entry = _renamed(store, name, source, kind, whole, made)
        else:
            added, entry = _added(store, layer, name, source, kind, whole, made)
    return PackReport(
        layer=added,
        entry=entry,
        layers=len(store.layers_of(entry.digest)),
        entries=flat.entries,
        size=flat.size,
        left_out=made.left_out,
        renamed=flat.renamed,
        completed=flat.completed,
    )


def _made(flat: Flattening, asked: Provenance | None) -> Provenance:
    return msgspec.structs.replace(
        asked or Provenance(),
        entries=flat.entries,
        content=flat.size,
        left_out=dict(sorted(flat.left_out.items())),
        renamed=flat.renamed,
        completed=flat.completed,
    )


def _added(
    store: LayerStore, layer: Path, name: str, source: str, kind: str, whole: Whole | None, made: Provenance
) -> tuple[Layer, NameEntry]:
    if whole is None:
        added = store.add(layer, name, source=source, kind=kind, provenance=made)
        return added, store.catalog.entry(name, added.version)
    digest = content.read(layer).digest
    stack = StackFile(layers=(*whole.below, digest), config=whole.config)
    entry = store.add_stack({digest: layer}, stack, name, source=source, kind=kind, provenance=made)
    return Layer(digest, store.layer_path(digest), store.size(digest)), entry


def _renamed(
    store: LayerStore, name: str, source: str, kind: str, whole: Whole, made: Provenance
) -> tuple[Layer, NameEntry]:
    """Nothing was changed: the image has the layers that the sandbox was made of, and none on top."""
    stack = StackFile(layers=whole.below, config=whole.config)
    entry = store.add_stack({}, stack, name, source=source, kind=kind, provenance=made)
    top = whole.below[-1]
    return Layer(top, store.layer_path(top), store.size(top)), entry


def found(store: LayerStore, name: str, sandbox: str, operation: str) -> PackedLayer | None:
    """What the request of this key made of a sandbox's changes, if it came so far. Blocking."""
    for version in sorted(store.catalog.versions(name), reverse=True):
        entry = store.catalog.entry(name, version)
        made = entry.provenance
        if made is not None and (entry.source, entry.kind, made.operation) == (sandbox, KIND, operation):
            layers = store.layers_of(entry.digest)
            return PackedLayer(
                **_names(entry, sandbox),
                layer=layers[-1],
                layers=len(layers),
                size=store.size(layers[-1]),
                content=made.content,
                entries=made.entries,
                left_out=dict(made.left_out),
                renamed=made.renamed,
                completed=made.completed,
            )
    return None


def described(report: PackReport, sandbox: str) -> PackedLayer:
    """For whoever asked for it. The entry may be of an earlier request that had the same content."""
    return PackedLayer(
        **_names(report.entry, sandbox),
        layer=report.layer.digest,
        layers=report.layers,
        size=report.layer.size,
        content=report.size,
        entries=report.entries,
        left_out=dict(report.left_out),
        renamed=report.renamed,
        completed=report.completed,
    )


def _names(entry: NameEntry, sandbox: str) -> dict[str, Any]:
    return {
        "name": entry.name,
        "version": entry.version,
        "reference": entry.reference,
        "digest": entry.digest,
        "sandbox": sandbox,
    }


@contextmanager
def _directory(at: Path | int) -> Iterator[int]:
    """Open for reading. Of a descriptor another one, which has its own position."""
    fd = os.open(at, DIRECTORY) if isinstance(at, Path) else syscalls.open_beneath(b".", os.O_DIRECTORY, dir_fd=at)
    try:
        yield fd
    finally:
        os.close(fd)
