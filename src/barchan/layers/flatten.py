"""From the upper directory of an overlay to a tree that is a layer of its own.

overlayfs leaves two kinds of entries that mean nothing without the mount that made them: a directory that was renamed
points to where it is in the layers below, and a file of which only attributes were changed has its content there. Both are
made whole: the directory brings all that it shows and hides what lies below it, the file gets its content. What merely hides
nothing (a new directory marked opaque, a whiteout of nothing) loses its mark, so that the layer changes no more than it must
wherever it is used.

Only what the policy keeps is copied. Removals are always kept: what was deleted must not come back because a rule matches.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from barchan.kernel import syscalls
from barchan.layers import upper
from barchan.layers.layer_tree import LayerTree
from barchan.layers.lower import Attributes, Lower, Parts, is_whiteout
from barchan.layers.scrub import Policy

PHASE = "pack"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_SOCKETS, _DEVICES = "sockets", "devices"
_UPPER = -1
"""In place of the index of a layer below."""


class _Place(NamedTuple):
    """A directory of the layer in the making."""

    path: Parts
    upper: bool
    """It has a part in the upper directory."""
    below: Parts | None
    """Where in the layers below the rest of what it shows comes from."""
    whole: bool = False
    """That rest is to be copied."""
    covers: bool = True
    """The layers below would show through it, at its own path."""
    rule: str = ""
    """Of the policy, when of all below it only removals are kept."""


class Flattening:
    """One use. `source` and `target` are directories open for reading, `target` empty; `room` is in bytes.

    `run` raises `InvalidRequest` naming what no layer may hold, `NodeStorageFull`, `CreateFailed`, all in the phase `pack`.
    """

    def __init__(self, source: int, target: int, below: Lower, policy: Policy, room: int) -> None:
        self._source, self._below, self._policy = source, below, policy
        self._device = os.fstat(source).st_dev
        self._tree = LayerTree(target, room, phase=PHASE, field="sandbox")
        self.left_out: Counter[str] = Counter()
        self.renamed = self.completed = 0
        self._root = Attributes()

    @property
    def entries(self) -> int:
        return self._tree.entries

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return self._tree.size

    def run(self) -> None:
        todo = [_Place((), True, ())]
        with self._tree.typed((), "read"):
            self._root = upper.read(b".", self._source).attributes
            self._tree.root(self._root)
        while todo:
            todo += self._directory(todo.pop())
        self._tree.finish()

    @property
    def nothing(self) -> bool:
        """Whether it is as if there were no layer, once it ran. Of the root, which every sandbox has anew, the time does not count."""
        found = self._below.find(())
        if self.entries or found is None:
            return False
        below = self._below.attributes_of((), found)
        return msgspec.structs.replace(self._root, mtime_ns=below.mtime_ns) == below

    def _directory(self, place: _Place) -> list[_Place]:
        with self._tree.opened(place.path) as out:
            found, names = list[_Place](), set[bytes]()
            if place.upper:
                with self._opened(place.path) as fd:
                    names = {os.fsencode(name) for name in os.listdir(fd)}
                    found += filter(None, (self._changed(place, name, fd, out) for name in sorted(names)))
            if place.whole and place.below is not None and not place.rule:
                rest = (name for name in self._below.names(place.below) if name not in names)
                found += filter(None, (self._inherited(place, name, out) for name in rest))
        return found

    # --- entries of the upper directory

    def _changed(self, place: _Place, name: bytes, fd: int, out: int) -> _Place | None:
        path = (*place.path, name)
        with self._tree.typed(path, "read"):
            entry = upper.read(name, fd)
        if entry.state.st_dev != self._device:
            raise self._tree.refused(path, "is on another file system or in another subvolume")
        if is_whiteout(entry.state):
            if self._covered(place, path):
                self._tree.removal(path, out, entry.attributes.mtime_ns)
            return None
        rule = place.rule or self._policy.rule_of(b"/".join(path), directory=entry.is_directory)
        if entry.is_directory:
            return self._changed_directory(place, path, out, entry, rule)
        if rule:
            self.left_out[rule] += 1
        elif stat.S_IFMT(entry.state.st_mode) in (stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK):
            self.left_out[_SOCKETS if stat.S_ISSOCK(entry.state.st_mode) else _DEVICES] += 1
        else:
            self._changed_file(place, path, fd, out, entry)
        return None

    def _covered(self, place: _Place, path: Parts) -> os.stat_result | None:
        """What the layers below would show at the entry's own path."""
        found = self._below.find(path) if place.covers else None
        return found[1] if found else None

    def _changed_directory(self, place: _Place, path: Parts, out: int, entry: upper.Entry, rule: str) -> _Place | None:
        covered = self._covered(place, path)
        hides = bool(entry.opaque or entry.redirect)
        if rule and (hides or covered is None or not stat.S_ISDIR(covered.st_mode)):
            self.left_out[rule] += 1
            if hides and covered:
                self._tree.removal(path, out, entry.attributes.mtime_ns)
            return None
        below = self._origin(place, path, entry)
        self.renamed += bool(entry.redirect)
        self._tree.mkdir(path, out, entry.attributes, opaque=hides and covered is not None)
        through = not hides and covered is not None and stat.S_ISDIR(covered.st_mode)
        return _Place(path, True, below, place.whole or bool(entry.redirect), through, rule)

    def _origin(self, place: _Place, path: Parts, entry: upper.Entry) -> Parts | None:
        """Where in the layers below the rest of a directory is."""
        if entry.opaque and not entry.redirect:
            return None
        if not entry.redirect:
            at = None if place.below is None else (*place.below, path[-1])
            found = self._below.find(at) if at is not None and (place.whole or place.covers) else None
            return at if found and stat.S_ISDIR(found[1].st_mode) else None
        at = upper.origin(entry.redirect, place.below)
        found = self._below.find(at) if at is not None else None
        if found is None or not stat.S_ISDIR(found[1].st_mode):
            raise self._tree.refused(
                path, f"was renamed from {entry.redirect!r}, which is no directory of the layers below"
            )
        return at

    def _changed_file(self, place: _Place, path: Parts, fd: int, out: int, entry: upper.Entry) -> None:
        if self._tree.linked(path, (_UPPER, entry.state.st_ino), entry.state, out):
            return
        if not entry.metacopy:
            return self._tree.copy(path, fd, path[-1], out, entry.state, entry.attributes)
        at = upper.origin(entry.redirect or path[-1], place.below)
        found = self._below.find(at) if at is not None else None
        if at is None or found is None or not stat.S_ISREG(found[1].st_mode):
            raise self._tree.refused(path, f"has its content at {entry.redirect or path[-1]!r} below, where no file is")
        self.completed += 1
        with self._below.opened(at, found[0]) as source:
            self._tree.copy(path, source, at[-1], out, found[1], entry.attributes)

    # --- entries of the layers below that a renamed directory shows

    def _inherited(self, place: _Place, name: bytes, out: int) -> _Place | None:
        assert place.below is not None
        path, at = (*place.path, name), (*place.below, name)
        found = self._below.find(at)
        if found is None:
            return None
        state, directory = found[1], stat.S_ISDIR(found[1].st_mode)
        if rule := self._policy.rule_of(b"/".join(path), directory=directory):
            self.left_out[rule] += 1
            return None
        attributes = upper.kept(self._below.attributes_of(at, found))
        if directory:
            self._tree.mkdir(path, out, attributes, opaque=False)
            return _Place(path, False, at, True, False)
        if not self._tree.linked(path, (found[0], state.st_ino), state, out):
            with self._below.opened(at, found[0]) as source:
                self._tree.copy(path, source, at[-1], out, state, attributes)
        return None

    @contextmanager
    def _opened(self, path: Parts) -> Iterator[int]:
        """A directory of the source."""
        with self._tree.typed(path, "opened"):
            fd = syscalls.open_beneath(b"/".join(path) or b".", _DIRECTORY, dir_fd=self._source)
        try:
            yield fd
        finally:
            os.close(fd)
