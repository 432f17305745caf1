"""Consecutive small layers of an image become one each, off-line: fewer mounts for each sandbox that is made of it.

A group that was merged before, on layers that mean the same to it, is not merged again, whichever image it is in.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from barchan.errors import InvalidRequest
from barchan.kernel import directories
from barchan.layers import content, erofs
from barchan.layers.catalog import NameEntry, flock
from barchan.layers.conversions import Conversion, Conversions
from barchan.layers.lower import DIRECTORY, Lower
from barchan.layers.merge import Merge
from barchan.layers.store import Layer, LayerStore, StackFile
from barchan.layers.view import View, opened, stack_of
from barchan.names import check_name
from barchan.spec import MIB

BELOW = 16 * MIB
KIND = "collapse"
_SPARE = 64 * MIB


class Collapsed(msgspec.Struct, frozen=True, kw_only=True):
    """`before` and `after`: how many layers."""

    entry: NameEntry
    before: int
    after: int


def groups(sizes: Sequence[int], below: int) -> list[range]:
    """Runs of two or more consecutive layers that are each smaller than `below`. Pure."""
    found, start = list[range](), 0
    for at, size in enumerate((*sizes, below)):
        if size >= below:
            found.append(range(start, at))
            start = at + 1
    return [run for run in found if len(run) > 1]


def collapse(
    store: LayerStore,
    ref: str,
    name: str = "",
    *,
    below: int = BELOW,
    progress: Callable[[str], None] = lambda line: None,
) -> Collapsed:
    """Merge the layers of `ref` that are smaller than `below` bytes with their small neighbours.

    The result is the next version of `name`, or of the name in `ref`, which must then be its newest version. It shows the same, and
    has the same configuration. With nothing to merge there is no new version. One at a time for each image.

    Raises `InvalidRequest`, `LayerCorrupt`, `NodeStorageFull`, `CreateFailed`; nothing half-made stays behind.
    """
    image = store.resolve(ref)
    if name:
        check_name(name, "new")
    else:
        _check_newest(store, image)
    stack = stack_of(image)[::-1]
    with _alone(store, stack), store.temporary() as work:
        merging = _Merging(store, stack, work, progress)
        layers = merging.run(groups([layer.size for layer in stack], below))
        if len(layers) == len(stack) and not name:
            entry = store.catalog.entry(image.name, image.version)
        else:
            entry = _add(store, merging.made, StackFile(layers=layers, config=image.config), image, name)
        merging.record()
    return Collapsed(entry=entry, before=len(stack), after=len(layers))


def _check_newest(store: LayerStore, image: Layer) -> None:
    if not image.name:
        raise InvalidRequest("new: a digest has no next version", field="new", hint="give the result a name")
    newest = max(store.catalog.versions(image.name))
    if image.version != newest:
        raise InvalidRequest(
            f"new: version {image.version} of {image.name} is not the newest, {newest}",
            field="new",
            hint="give the result a name",
        )


def _alone(store: LayerStore, stack: Sequence[Layer]) -> AbstractContextManager[None]:
    """Others who want the same wait, and then find it."""
    return flock(store.pulling / _key(layer.digest for layer in stack).removeprefix("sha256:"), fcntl.LOCK_EX)


def _key(digests: Iterable[str]) -> str:
    """Under which a merged group is recorded. Of no tar: those are hashes of archives."""
    return "sha256:" + hashlib.sha256("\n".join(("collapse", *digests)).encode()).hexdigest()


def _add(store: LayerStore, made: dict[str, Path], stack: StackFile, image: Layer, name: str) -> NameEntry:
    """Of an image of a registry, also under the name that its digest there makes: it is still that image."""
    if name:
        return store.add_stack(made, stack, name, source=image.reference, kind=KIND)
    old = store.catalog.entry(image.name, image.version)
    pinned = old.reference if old.manifest else old.name
    entry = store.add_stack(made, stack, pinned, source=old.source, kind=KIND, manifest=old.manifest)
    if pinned == old.name:
        return entry
    with store.catalog.locked(old.name):
        return store.catalog.add(msgspec.structs.replace(entry, name=old.name))


class _Merging:
    """Of one stack, bottom first. What is new lies in `work` until the whole image is there."""

    def __init__(self, store: LayerStore, stack: Sequence[Layer], work: Path, progress: Callable[[str], None]) -> None:
        self._store, self._known = store, Conversions(store)
        self._stack, self._work, self._progress = stack, work, progress
        self._new: list[Conversion] = []
        self.made: dict[str, Path] = {}

    def run(self, chosen: Sequence[range]) -> tuple[str, ...]:
        """Digests of the layers, bottom first. Of two equal ones the upper covers all that the lower could show."""
        merged = {run.start: self._merged(run) for run in chosen}
        gone = {at for run in chosen for at in run[1:]}
        digests = [merged.get(at) or layer.digest for at, layer in enumerate(self._stack) if at not in gone]
        return tuple(dict.fromkeys(reversed(digests)))[::-1]

    def _merged(self, run: range) -> str:
        group, under = self._stack[run.start : run.stop], self._stack[: run.start]
        key = _key(layer.digest for layer in group)
        with opened(self._store, under[::-1]) as below:
            found = next((one for one in self._known.of(key) if below.gives(one.facts)), None)
            if found is None:
                self._progress(f"merging layers {run.start + 1} to {run.stop} of {len(self._stack)}")
                digest = self._merge(group, below)
                found = Conversion(diff_id=key, layer=digest, facts=tuple(below.facts.values()))
                self._new.append(found)
        return found.layer

    def _merge(self, group: Sequence[Layer], below: Lower) -> str:
        with self._store.temporary() as work, opened(self._store, group[::-1]) as layers:
            tree, layer = work / "tree", work / "layer"
            directories.make(tree, 0o755)
            target = os.open(tree, DIRECTORY)
            try:
                Merge(View(layers, whiteouts=True), below, target, shutil.disk_usage(work).free - _SPARE).run()
            finally:
                os.close(target)
            erofs.build(tree, layer, exact=True)
            digest = content.read(layer).digest
            self.made[digest] = layer.rename(self._work / digest)
        return digest

    def record(self) -> None:
        for conversion in self._new:
            self._known.note(conversion)
