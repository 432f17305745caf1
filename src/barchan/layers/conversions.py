"""What became of layers of OCI images: which layer of the store, and on which stacks it may be used again.

converted/<algorithm>-<hex of the diff id>/<hex of the layer>.json
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from barchan.kernel import directories
from barchan.layers import refs
from barchan.layers.lower import Fact
from barchan.layers.store import LayerStore

_FORMAT = 2
"""Raised when layers are converted differently: older records then count no more."""


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """`layer` is the tar of `diff_id` on every stack that gives these facts."""

    diff_id: str
    layer: str
    facts: tuple[Fact, ...] = ()
    bottom: bool = False
    """It hides all that is below it."""
    format: int = _FORMAT


class Conversions:
    """Of one store. A record whose layer was removed does not count."""

    def __init__(self, store: LayerStore) -> None:
        self._store = store

    def of(self, diff_id: str) -> Iterator[Conversion]:
        for path in sorted(self._directory(diff_id).glob("*.json")):
            try:
                found = msgspec.json.decode(path.read_bytes(), type=Conversion)
            except (FileNotFoundError, msgspec.DecodeError):
                continue
            if found.format == _FORMAT and self._store.intact(found.layer):
                yield found

    def note(self, conversion: Conversion) -> None:
        """Blocking, and not synced: a record that is lost costs a conversion."""
        directory = self._directory(conversion.diff_id)
        directories.private(directory)
        path = directory / f"{refs.hex_of(conversion.layer)}.json"
        part = path.with_suffix(".new")
        part.write_bytes(msgspec.json.encode(conversion))
        part.rename(path)

    def _directory(self, diff_id: str) -> Path:
        return self._store.converted / diff_id.replace(":", "-")
