"""What a stack of layers shows, or one layer alone brings, entry by entry in sorted order.

The layers are looked at as they are, by the rules of overlayfs, without a mount of it. Memory is bounded by the largest directory:
its names are held, not what they stand for.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from barchan.errors import FileFailure, FileMissing, FileNotDirectory
from barchan.layers import lower
from barchan.layers.layer_tree import shown
from barchan.layers.lower import DIRECTORY, Attributes, Lower, Parts, is_opaque, is_whiteout, open_directory
from barchan.layers.store import Layer, LayerStore

_LINKS = 40
"""Links followed on the way to one file, as by the kernel."""


class Folder(NamedTuple):
    """A directory. `layers`: the indexes of those that bring something to it, top first."""

    path: Parts
    layers: tuple[int, ...]
    hides: bool = False
    """Nothing of the layers below those of the view shows through it."""
    opaque: bool = False
    """By itself, and not for the sake of a directory above."""


class Entry(NamedTuple):
    """Of a directory. `layer` is the index, from the top, of the one that `state` comes from."""

    path: Parts
    layer: int
    state: os.stat_result
    folder: Folder | None = None
    """Of a directory."""
    covered: bool = False
    """The directory that it is in hides what the layers below those of the view have there."""

    @property
    def whiteout(self) -> bool:
        return is_whiteout(self.state)


class View:
    """Of the layers that `below` has, top first. With `whiteouts` removals are shown too: of a part of a stack."""

    def __init__(self, below: Lower, *, whiteouts: bool = False) -> None:
        self._below, self.whiteouts = below, whiteouts

    def root(self) -> Entry:
        """Its directory comes from all layers: overlayfs knows no opaque root."""
        roots = self._below.roots
        return Entry((), 0, os.fstat(roots[0]), Folder((), tuple(range(len(roots)))))

    def layers(self) -> Iterator[View]:
        """Each alone, top first, with what it removes."""
        for root in self._below.roots:
            yield View(Lower(functools.partial(tuple[int, ...], (root,))), whiteouts=True)

    def listing(self, folder: Folder) -> Listing:
        return Listing(self._below.roots, folder, whiteouts=self.whiteouts)

    def entries(self, folder: Folder) -> Iterator[Entry]:
        """Of one directory, by name."""
        listing = self.listing(folder)
        try:
            for name in listing.names:
                entry = listing.entry(name)
                if entry.folder is not None:
                    listing.close()  # others may be open below it
                yield entry
        finally:
            listing.close()

    def walk(self, folder: Folder) -> Iterator[Entry]:
        """All below a directory, each directory before what is in it; sorted by path, name by name."""
        stack = [self.entries(folder)]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
                continue
            yield entry
            if entry.folder is not None:
                stack.append(self.entries(entry.folder))

    def attributes(self, entry: Entry) -> Attributes:
        return self._below.attributes_of(entry.path, (entry.layer, entry.state))

    def target(self, entry: Entry) -> bytes:
        """Of a link."""
        with self.parent(entry) as fd:
            return os.readlink(entry.path[-1], dir_fd=fd)

    def parent(self, entry: Entry) -> AbstractContextManager[int]:
        """The directory of the layer that has it, open."""
        return self._below.opened(entry.path, entry.layer)

    @contextmanager
    def content(self, entry: Entry) -> Iterator[int]:
        """A regular file, open for reading."""
        assert stat.S_ISREG(entry.state.st_mode)
        with self.parent(entry) as directory:
            fd = os.open(entry.path[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            yield fd
        finally:
            os.close(fd)

    # --- one path

    def find(self, path: bytes, *, follow: bool = True) -> Entry:
        """What is at a path. Links on the way, and with `follow` at its end, are resolved inside the root, as in a sandbox.

        `FileMissing`, `FileNotDirectory`, `FileFailure` for links in a circle.
        """
        todo, at, links = path.split(b"/")[::-1], [self.root()], 0
        while todo:
            part = todo.pop()
            folder = at[-1].folder
            if folder is None:
                raise FileNotDirectory(f"{shown(at[-1].path)} is not a directory")
            if part in (b"", b"."):
                continue
            if part == b"..":
                at = at[:-1] or at
                continue
            entry = self._child(folder, part)
            if not stat.S_ISLNK(entry.state.st_mode) or not (follow or todo):
                at.append(entry)
                continue
            links += 1
            if links > _LINKS:
                raise FileFailure(f"{shown(entry.path)} leads through more than {_LINKS} links")
            target = self.target(entry)
            todo += target.split(b"/")[::-1]
            at = at[:1] if target.startswith(b"/") else at
        return at[-1]

    def _child(self, folder: Folder, name: bytes) -> Entry:
        listing = self.listing(folder)
        try:
            return listing.entry(name)
        except FileNotFoundError as error:
            raise FileMissing(f"{shown((*folder.path, name))}: no such file or directory") from error
        except OSError as error:
            raise FileFailure(f"{shown((*folder.path, name))}: {error.strerror}") from error
        finally:
            listing.close()


class Listing:
    """The names of one directory of several layers. Descriptors are opened when they are needed, and again after `close`."""

    def __init__(self, roots: Sequence[int], folder: Folder, *, whiteouts: bool) -> None:
        self._roots, self._folder, self._whiteouts = roots, folder, whiteouts
        self._open: dict[int, int] = {}

    @property
    def names(self) -> list[bytes]:
        """Sorted. What is only a whiteout counts as the listing does."""
        found: set[bytes] = set()
        hidden: set[bytes] = set()
        for layer in self._folder.layers:
            with os.scandir(self._fd(layer)) as entries:
                for entry in entries:
                    name = os.fsencode(entry.name)
                    if name in found or name in hidden:
                        continue
                    (hidden if not self._whiteouts and lower.whited_out(entry) else found).add(name)
        return sorted(found)

    def entry(self, name: bytes) -> Entry:
        """`FileNotFoundError` when there is none, or it was removed."""
        path = (*self._folder.path, name)
        for layer in self._folder.layers:
            state = lower.state_of(name, self._fd(layer))
            if state is None:
                continue
            if stat.S_ISDIR(state.st_mode):
                return Entry(path, layer, state, self._merged(path, layer), self._folder.hides)
            if is_whiteout(state) and not self._whiteouts:
                break
            return Entry(path, layer, state, covered=self._folder.hides)
        raise FileNotFoundError(errno.ENOENT, "no such file")

    def _merged(self, path: Parts, top: int) -> Folder:
        """The directory from the layer `top` down to what hides the rest."""
        layers, hides = list[int](), self._folder.hides
        for layer in self._folder.layers[self._folder.layers.index(top) :]:
            state = lower.state_of(path[-1], self._fd(layer))
            if state is None:
                continue
            if not stat.S_ISDIR(state.st_mode):
                return Folder(path, tuple(layers), True, True)
            layers.append(layer)
            if self._is_opaque(path[-1], layer):
                return Folder(path, tuple(layers), True, True)
        return Folder(path, tuple(layers), hides)

    def _is_opaque(self, name: bytes, layer: int) -> bool:
        fd = os.open(name, DIRECTORY, dir_fd=self._fd(layer))
        try:
            return is_opaque(fd)
        finally:
            os.close(fd)

    def _fd(self, layer: int) -> int:
        if layer not in self._open:
            self._open[layer] = open_directory(self._roots[layer], self._folder.path)
        return self._open[layer]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def stack_of(image: Layer) -> tuple[Layer, ...]:
    """Its layers, top first."""
    return (image, *reversed(image.below))


@contextmanager
def opened(store: LayerStore, layers: Sequence[Layer]) -> Iterator[Lower]:
    """Layers of the store, top first, checked before they are mounted where nobody else sees them. `LayerCorrupt`."""
    for layer in layers:
        store.check(layer)
    with lower.mounted([layer.path for layer in layers]) as found:
        yield found
