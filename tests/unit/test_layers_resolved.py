"""Names remembered: never an answer that the store would not give."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from barchan.errors import EnvironmentNotFound
from barchan.layers.resolved import SETTLED_NS, ResolvedNames
from barchan.layers.store import LayerStore
from tests.unit.test_layers_store import add


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers")


def settle(store: LayerStore, name: str) -> None:
    """As if its last change were long ago."""
    past = store.catalog.changed(name) - 2 * SETTLED_NS
    os.utime(store.root / "names" / name, ns=(past, past))


def test_a_settled_name_is_not_read_again(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = add(store, "base", b"one")
    settle(store, "base")
    resolve = ResolvedNames(store)
    assert resolve("base") == layer
    monkeypatch.setattr(store, "resolve", lambda ref: pytest.fail("it was read again"))
    assert resolve("base") == layer


def test_a_new_version_is_seen_at_once(store: LayerStore) -> None:
    add(store, "base", b"one")
    settle(store, "base")
    resolve = ResolvedNames(store)
    assert resolve("base").version == 1
    add(store, "base", b"two")
    assert resolve("base").version == 2
    add(store, "base", b"three")
    assert resolve("base").version == 3, "also within one tick of the clock"


def test_a_removed_name_is_gone(store: LayerStore) -> None:
    add(store, "base", b"one")
    settle(store, "base")
    resolve = ResolvedNames(store)
    resolve("base")
    store.remove("base")
    with pytest.raises(EnvironmentNotFound):
        resolve("base")
