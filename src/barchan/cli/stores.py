"""The layer store of this host, for commands that work on it as root, without a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from barchan.cli.session import need_root

if TYPE_CHECKING:
    from barchan.layers.store import LayerStore


def open_store(data: Path) -> LayerStore:
    """Made if it is not there."""
    from barchan.cli.datadir import prepare
    from barchan.config import Layout
    from barchan.layers.store import LayerStore

    need_root("barchan env")
    layout = Layout(Path(os.path.abspath(data)))
    prepare(layout)
    return LayerStore(layout.layers)


def existing_store(data: Path) -> LayerStore | None:
    from barchan.config import Layout

    need_root("barchan env")
    return open_store(data) if Layout(Path(os.path.abspath(data))).layers.is_dir() else None
