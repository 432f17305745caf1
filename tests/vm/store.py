"""A layer store made on this host, to be taken into a test machine."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from barchan.kernel.sharing import OPTIONS
from barchan.layers import erofs
from barchan.layers.sources import import_layer
from barchan.layers.store import LayerStore
from tests import erofs_utils

SAME = 1 << 20


def with_equal_files(directory: Path, monkeypatch: pytest.MonkeyPatch, *, sharing: bool) -> bytes:
    """A compressed tar of a store whose layers `one` and `two` hold an equal file. `sharing`: as a host makes it whose kernel shares."""
    monkeypatch.setattr("barchan.kernel.sharing.options", lambda: OPTIONS if sharing else ())
    monkeypatch.setenv("PATH", str(erofs_utils.fetch("sid")), prepend=os.pathsep)
    content = os.urandom(SAME)
    store = LayerStore(directory / "store")
    erofs._help.cache_clear()
    try:
        for name in ("one", "two"):
            tree = directory / name
            tree.mkdir()
            (tree / "same").write_bytes(content)
            (tree / "own").write_text(name)
            import_layer(store, name, tree)
    finally:
        erofs._help.cache_clear()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(store.root, "store")
    return packed.getvalue()
