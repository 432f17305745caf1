"""`barchan layer`: what takes room, and giving it back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from barchan.config import Layout
from barchan.layers.store import LayerStore
from tests.unit.test_layers_gc import add

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: as the store does")


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    (tmp_path / "data").mkdir(0o700)
    return LayerStore(Layout(tmp_path / "data").layers)


def run(store: LayerStore, *argv: str) -> object:
    command = [sys.executable, "-m", "barchan.cli.main", "layer", *argv, "--data", str(store.root.parent), "--json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_room_by_name(store: LayerStore) -> None:
    add(store, "one", b"shared")
    add(store, "two", b"shared")
    add(store, "two", b"of two alone")
    lost = add(store, "three", b"lost")
    store.remove("three")
    assert run(store, "du") == {
        "names": [
            {"name": "one@1", "total": 6, "own": 0, "layers": 1},
            {"name": "two@1", "total": 6, "own": 0, "layers": 1},
            {"name": "two@2", "total": 12, "own": 12, "layers": 1},
        ],
        "stored": 22,
        "unused": 4,
    }
    assert lost in store.sizes()


def test_what_nobody_needs_is_removed_when_it_is_meant(store: LayerStore) -> None:
    digest = add(store, "one", b"content")
    store.remove("one")
    for argv, kept in ((("--dry-run", "--grace", "0"), True), ((), True), (("--grace", "0"), False)):
        told = run(store, "gc", *argv)
        assert isinstance(told, dict) and told["bytes"] == (0 if not argv else 7), argv
        assert (digest in store.sizes()) == kept
