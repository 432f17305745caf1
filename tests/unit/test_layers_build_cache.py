"""Names of build steps stay while builds use them, and then go: in bounds, and never what a kept one stands on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.layers import build_cache, content
from barchan.layers.build_cache import KEEP, Kept, expired
from barchan.layers.gc import collect
from barchan.layers.store import LayerStore, StackFile
from barchan.names import SCRATCH

NOW = 1_700_000_000.0
STEPS = {"a": Kept(0, ("1",)), "ab": Kept(0, ("1", "2")), "abc": Kept(NOW, ("1", "2", "3")), "ax": Kept(0, ("1", "4"))}


def test_what_a_used_step_stands_on_stays_with_it() -> None:
    assert expired(STEPS, NOW) == {"ax"}
    assert expired(STEPS, NOW + KEEP - 1) == {"ax"}
    assert expired(STEPS, NOW + KEEP) == set(STEPS)


def test_there_are_never_many_more_than_the_most() -> None:
    steps = {str(number): Kept(NOW + number, (str(number),)) for number in range(10)}
    assert expired(steps, NOW, most=3) == {str(number) for number in range(7)}


@given(
    st.dictionaries(
        st.text("abc", min_size=1),
        st.builds(Kept, st.floats(0, 20), st.lists(st.sampled_from("123"), min_size=1).map(tuple)),
    ),
    st.integers(1, 5),
)
def test_whatever_there_is(steps: dict[str, Kept], most: int) -> None:
    gone = expired(steps, 20, 10, most)
    kept = {name: step for name, step in steps.items() if name not in gone}
    recent = {name for name, step in steps.items() if 20 - step.used < 10}
    if len(recent) <= most:
        assert recent <= set(kept)
    for step in kept.values():
        assert any(steps[name].layers[: len(step.layers)] == step.layers for name in recent)


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers")


def add(store: LayerStore, name: str, *layers: bytes) -> None:
    digests = []
    for text in layers:
        with store.temporary() as work:
            layer = work / "layer"
            layer.mkdir()
            (layer / "image").touch()
            (layer / "data").write_bytes(text)
            content.finish(layer, "split")
            digests.append(store.add(layer, "part").digest)
    store.add_stack({}, StackFile(layers=tuple(digests)), name, source="", kind="")


def test_names_go_and_their_layers_after_them(store: LayerStore) -> None:
    first, second, mine = f"build-{'1' * 40}", f"build-{'2' * 40}", "build-mine"
    add(store, first, b"base", b"one")
    add(store, second, b"base", b"two")
    add(store, mine, b"base", b"three")
    store.remove("part")
    build_cache.use(store.catalog, first)
    build_cache.use(store.catalog, mine)
    used = store.catalog.root / first / "used"
    assert used.exists() and not (store.catalog.root / mine / "used").exists()
    later = used.stat().st_mtime + KEEP + 1
    os.utime(used, (later, later))
    assert build_cache.expire(store, later) == (second,)
    assert build_cache.expire(store, later) == ()
    assert {entry.name for entry in store.catalog.entries()} == {first, mine}
    assert len(collect(store, grace=0).removed) == 1
    assert build_cache.expire(store, later + KEEP) == (first,)
    assert {entry.name for entry in store.catalog.entries()} == {mine}


def test_nothing_at_all_is_such_a_name_too(store: LayerStore) -> None:
    add(store, SCRATCH, b"empty")
    build_cache.use(store.catalog, SCRATCH)
    assert not build_cache.expire(store)
