"""What of a layer is worth reading ahead: a list beside the layer, made from what was read once (`access`).

<store>/prefetch/<hex>.json    for the layer sha256:<hex>
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from barchan.errors import LayerCorrupt
from barchan.kernel import residency, syscalls
from barchan.kernel.residency import Range
from barchan.layers import refs
from barchan.layers.access import LayerAccess
from barchan.layers.catalog import REMEDY, write
from barchan.layers.store import LayerStore


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of one file. The path is relative to the layer's root."""

    path: bytes
    ranges: tuple[Range, ...]


class PrefetchList(msgspec.Struct, frozen=True, kw_only=True):
    files: tuple[Wanted, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(length for file in self.files for _, length in file.ranges)


def save(store: LayerStore, seen: LayerAccess) -> PrefetchList:
    """In place of the list that the layer had."""
    made = PrefetchList(files=tuple(Wanted(path=file.path, ranges=file.ranges) for file in seen.read))
    write(_place(store, seen.digest), msgspec.json.encode(made))
    return made


def load(store: LayerStore, digest: str) -> PrefetchList | None:
    """None: there is none. Raises `LayerCorrupt`."""
    try:
        return msgspec.json.decode(_place(store, digest).read_bytes(), type=PrefetchList)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise LayerCorrupt(f"the prefetch list of {digest} cannot be read: {error}", hint=REMEDY) from error


def remove(store: LayerStore, digest: str) -> None:
    """Idempotent."""
    _place(store, digest).unlink(missing_ok=True)


def fetch(root: int, wanted: PrefetchList) -> int:
    """Start reading into memory; returns the bytes asked for. `root`: the layer's mount. What is not there is passed over."""
    asked = 0
    for file in wanted.files:
        with suppress(OSError):
            fd = syscalls.open_beneath(file.path, os.O_RDONLY, dir_fd=root)
            try:
                residency.fetch(fd, file.ranges)
            finally:
                os.close(fd)
            asked += sum(length for _, length in file.ranges)
    return asked


def _place(store: LayerStore, digest: str) -> Path:
    return store.prefetch / f"{refs.hex_of(digest)}.json"
