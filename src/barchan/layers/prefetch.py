"""What of a layer is worth reading ahead: a list beside the layer, made from what was read once (`access`).

<store>/prefetch/<hex>.json    for the layer sha256:<hex>
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from barchan.errors import LayerCorrupt
from barchan.kernel import residency, syscalls
from barchan.kernel.residency import Range
from barchan.layers import refs
from barchan.layers.catalog import REMEDY, write
from barchan.layers.store import LayerStore

if TYPE_CHECKING:
    from barchan.layers.access import LayerAccess

logger = logging.getLogger(__name__)


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


def begin(store: LayerStore, digest: str, mount: Path) -> None:
    """If there is a list, have it read by a thread, which does not keep the layer from being unmounted."""
    try:
        wanted = load(store, digest)
    except LayerCorrupt as error:
        logger.warning("nothing is read ahead: %s", error)
        return
    if wanted is not None:
        threading.Thread(
            target=_fetch, args=(syscalls.open_tree(mount, clone=True), wanted), name="prefetch", daemon=True
        ).start()


def _fetch(root: int, wanted: PrefetchList) -> None:
    try:
        fetch(root, wanted)
    finally:
        os.close(root)


def _place(store: LayerStore, digest: str) -> Path:
    return store.prefetch / f"{refs.hex_of(digest)}.json"
