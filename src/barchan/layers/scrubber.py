"""Layers are read whole from time to time: damage is found before a program meets it, and mended where their source is known.

A damaged layer is not mounted any more, nor counted as known, until it is whole again: a mark lies beside its files (`content`).
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable

import msgspec

from barchan.errors import BarchanError, LayerCorrupt
from barchan.layers.catalog import REMEDY, flock
from barchan.layers.pull import KIND
from barchan.layers.store import LayerStore

Mend = Callable[[str], object]
"""Fetches the image of that reference anew. Raises `BarchanError`."""


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that is not what its digest says."""

    digest: str
    why: str
    names: tuple[str, ...]
    """Of the environments made of it."""
    mended: bool = False
    remedy: str = ""


class Scrubbed(msgspec.Struct, frozen=True, kw_only=True):
    layers: int = 0
    """That were read."""
    size: int = 0
    """Bytes of them."""
    damaged: tuple[Damage, ...] = ()


def scrub(
    store: LayerStore,
    *,
    rate: float = 0,
    most: int = 0,
    older: float = 0,
    mend: Mend | None = None,
    stop: threading.Event | None = None,
) -> Scrubbed | None:
    """Read every layer, those first that were not read for longest. None when somebody else does, here or on another host.

    `rate`: bytes a second, `most`: bytes after which no other layer is begun, 0 for no limit; `older`: seconds since a layer was
    last read whole, for it to be read again; `stop` ends it early. Blocking. Costs a second of CPU for one or two GB.
    """
    now, layers, size, damaged = time.time(), 0, 0, list[Damage]()
    pace = _Pace(rate, stop or threading.Event())
    try:
        with flock(store.root / "scrub.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            for digest, last in sorted(store.verified().items(), key=lambda item: item[1]):
                if now - last < older or (most and size >= most):
                    break
                try:
                    size += store.scrub(digest, pace)
                except FileNotFoundError:
                    continue  # it was removed meanwhile
                except LayerCorrupt as error:
                    damaged.append(_damage(store, digest, error.message, mend))
                layers += 1
    except BlockingIOError:
        return None
    except _Stopped:
        pass
    return Scrubbed(layers=layers, size=size, damaged=tuple(damaged))


def _damage(store: LayerStore, digest: str, why: str, mend: Mend | None) -> Damage:
    entries = [entry for entry in store.catalog.entries() if digest in store.layers_of(entry.digest)]
    names = tuple(sorted({entry.reference for entry in entries}))
    images = sorted({entry.reference for entry in entries if entry.manifest and entry.kind == KIND})
    failed = ""
    for image in images if mend else ():
        try:
            assert mend is not None
            mend(image)
            store.size(digest)
        except (BarchanError, OSError) as error:
            failed = str(error)
            continue
        return Damage(digest=digest, why=why, names=names, mended=True)
    if images:
        remedy = f"fetch it again: `barchan env pull {images[0]}`" + (f" ({failed})" if failed else "")
    else:
        remedy = f"import the same content again, or {REMEDY}" if names else "`barchan layer gc` removes it"
    return Damage(digest=digest, why=why, names=names, remedy=remedy)


class _Stopped(Exception):
    pass


class _Pace:
    """Called with the bytes that were just read; waits so that they are no more than `rate` a second."""

    def __init__(self, rate: float, stop: threading.Event) -> None:
        self._rate, self._due, self._stop = rate, time.monotonic(), stop

    def __call__(self, size: int) -> None:
        now = time.monotonic()
        self._due = max(self._due, now - 1.0) + (size / self._rate if self._rate else 0)
        if self._stop.wait(max(self._due - now, 0)):
            raise _Stopped
