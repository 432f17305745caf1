"""Layers of sandboxes that live on other nodes of a shared store: kept, whatever was removed by name.

    <store>/held/<node>    digests, one a line; its time says until when they count

A node that was taken down for good, or stands still, holds nothing after an hour.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from barchan.kernel import directories
from barchan.layers.catalog import write
from barchan.layers.store import LayerStore

SECONDS = 3600.0
"""Several times as long as a node takes from one renewal to the next."""


def renew(store: LayerStore, node: str, digests: Collection[str]) -> None:
    """From now on the node holds these, and no others."""
    directories.private(store.root / "held")
    write(store.root / "held" / node, "".join(f"{digest}\n" for digest in sorted(digests)).encode())


def of_all(store: LayerStore) -> frozenset[str]:
    """What any node holds. Those of nodes that are gone are removed."""
    found = set[str]()
    try:
        entries = list(os.scandir(store.root / "held"))
    except FileNotFoundError:
        return frozenset()
    for entry in entries:
        try:
            if time.time() - entry.stat().st_mtime > SECONDS:
                os.unlink(entry.path)
            elif not entry.name.startswith("."):
                with open(entry.path) as file:
                    found.update(file.read().split())
        except FileNotFoundError:
            continue
    return frozenset(found)
