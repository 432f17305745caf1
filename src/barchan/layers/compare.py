"""What is different between two stacks of layers, path by path in sorted order.

A directory that comes from the same layers on both sides is not gone into, a file that is the same one is not read: stacks that share
what lies below cost what differs. Memory is bounded by the largest directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from barchan.layers.lower import Attributes, Parts
from barchan.layers.view import Entry, Folder, Listing, View

Status = Literal["A", "D", "M", "T"]
_PIECE = 1 << 20


class Change(msgspec.Struct, frozen=True):
    """Added, deleted, modified, or of another type. `what`, of M: content, mode, owner, xattrs, opaque, time.

    opaque: of layers that are looked at alone, what of the layers below it shows through a directory.
    """

    status: Status
    path: Parts
    what: tuple[str, ...] = ()


class Side(NamedTuple):
    """A view, and the digests of its layers, top first."""

    view: View
    digests: Sequence[str]

    def origin(self, folder: Folder) -> tuple[str, ...]:
        """Equal on both sides: so is all that is below."""
        return tuple(self.digests[layer] for layer in folder.layers)

    def file(self, entry: Entry) -> tuple[str, int]:
        """Equal on both sides: it is the same file."""
        return self.digests[entry.layer], entry.state.st_ino


_Pair = tuple[Folder | None, Folder | None]
_Found = tuple[Change | None, _Pair]
_NOTHING: _Pair = (None, None)


def compare(old: Side, new: Side, *, times: bool = False) -> Iterator[Change]:
    """From `old` to `new`. A change of the time of modification alone counts only with `times`."""
    return _Comparison(old, new, times).run()


class _Comparison:
    def __init__(self, old: Side, new: Side, times: bool) -> None:
        self._old, self._new, self._times = old, new, times
        self._alone = old.view.whiteouts and new.view.whiteouts

    def run(self) -> Iterator[Change]:
        stack = [iter([self._both(self._old.view.root(), self._new.view.root())])]
        while stack:
            found = next(stack[-1], None)
            if found is None:
                stack.pop()
                continue
            change, pair = found
            if change is not None:
                yield change
            if pair != _NOTHING:
                stack.append(self._directory(*pair))

    def _directory(self, old: Folder | None, new: Folder | None) -> Iterator[_Found]:
        """Names of two directories at the same path, of which one may be missing."""
        left = None if old is None else self._old.view.listing(old)
        right = None if new is None else self._new.view.listing(new)
        names, others = _names(left), _names(right)
        try:
            for name in sorted(names | others):
                one = left.entry(name) if left is not None and name in names else None
                two = right.entry(name) if right is not None and name in others else None
                found = self._entries(one, two)
                if found[1] != _NOTHING:
                    _close(left, right)
                yield found
        finally:
            _close(left, right)

    def _entries(self, old: Entry | None, new: Entry | None) -> _Found:
        if old is not None and new is not None:
            return self._both(old, new)
        if new is not None:
            return Change("A", new.path), (None, new.folder)
        assert old is not None
        return Change("D", old.path), (old.folder, None)

    def _both(self, old: Entry, new: Entry) -> _Found:
        if stat.S_IFMT(old.state.st_mode) != stat.S_IFMT(new.state.st_mode):
            return Change("T", new.path), (old.folder, new.folder)
        pair = _NOTHING
        if old.folder and new.folder and self._old.origin(old.folder) != self._new.origin(new.folder):
            pair = (old.folder, new.folder)
        what = () if self._old.file(old) == self._new.file(new) else tuple(self._what(old, new))
        return (Change("M", new.path, what) if what else None), pair

    def _what(self, old: Entry, new: Entry) -> Iterator[str]:
        if self._content_differs(old, new):
            yield "content"
        before, after = self._old.view.attributes(old), self._new.view.attributes(new)
        yield from _attributes(before, after)
        if self._alone and old.folder and new.folder and old.folder.opaque != new.folder.opaque:
            yield "opaque"
        if self._times and before.mtime_ns != after.mtime_ns:
            yield "time"

    def _content_differs(self, old: Entry, new: Entry) -> bool:
        if stat.S_ISLNK(old.state.st_mode):
            return self._old.view.target(old) != self._new.view.target(new)
        if not stat.S_ISREG(old.state.st_mode):
            return False
        if old.state.st_size != new.state.st_size:
            return True
        with self._old.view.content(old) as one, self._new.view.content(new) as two:
            while piece := os.read(one, _PIECE):
                if piece != os.read(two, _PIECE):
                    return True
        return False


def _attributes(before: Attributes, after: Attributes) -> Iterator[str]:
    if before.mode != after.mode:
        yield "mode"
    if (before.uid, before.gid) != (after.uid, after.gid):
        yield "owner"
    if before.xattrs != after.xattrs:
        yield "xattrs"


def _names(listing: Listing | None) -> frozenset[bytes]:
    return frozenset() if listing is None else frozenset(listing.names)


def _close(*listings: Listing | None) -> None:
    for listing in listings:
        if listing is not None:
            listing.close()
