from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from barchan.errors import LayerCorrupt, RegistryUnavailable
from barchan.layers.catalog import flock
from barchan.layers.gc import collect
from barchan.layers.pull import known
from barchan.layers.scrubber import scrub
from barchan.layers.store import LayerStore, StackFile
from tests.unit.test_layers_cache import add

IMAGE = "docker://registry.example/name@sha256:" + "0" * 64


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers", shared=True)


def spoil(store: LayerStore, digest: str, byte: bytes = b"x") -> None:
    data = store.layer_path(digest) / "data"
    data.chmod(0o600)
    with data.open("r+b") as file:
        file.seek(3000)
        file.write(byte)


def image(store: LayerStore, *layers: str) -> None:
    manifest = "sha256:" + "0" * 64
    store.add_stack({}, StackFile(layers=layers), IMAGE, source="", kind="registry", manifest=manifest)


def test_whole_layers_are_read_and_nothing_is_said(store: LayerStore) -> None:
    add(store, "one"), add(store, "two")
    found = scrub(store)
    assert found is not None and (found.layers, found.size, found.damaged) == (2, 8 << 20, ())
    again = scrub(store, older=3600)
    assert again is not None and again.layers == 0


def test_a_damaged_layer_is_named_and_not_used_until_it_is_whole(store: LayerStore) -> None:
    layer, other = add(store, "one"), add(store, "two")
    spoil(store, layer.digest)
    store.check(layer)
    found = scrub(store)
    assert found is not None and len(found.damaged) == 1
    assert (found.damaged[0].digest, found.damaged[0].names, found.damaged[0].mended) == (
        layer.digest,
        ("one@1",),
        False,
    )
    assert layer.digest in found.damaged[0].why and "import" in found.damaged[0].remedy
    for refused in (lambda: store.check(layer), lambda: store.resolve("one")):
        with pytest.raises(LayerCorrupt, match=layer.digest):
            refused()
    store.check(other)
    spoil(store, layer.digest, b"\0")
    whole = scrub(store)
    assert whole is not None and not whole.damaged
    store.check(layer)


def test_the_same_content_again_takes_the_place_of_the_damaged(store: LayerStore) -> None:
    layer = add(store, "one")
    spoil(store, layer.digest)
    scrub(store)
    assert add(store, "one") == layer
    store.check(layer)
    store.verify(layer.digest)


def test_an_image_of_a_registry_is_fetched_again(store: LayerStore) -> None:
    layer = add(store, "one")
    image(store, layer.digest)
    spoil(store, layer.digest)
    fetched: list[str] = []

    def mend(reference: str) -> None:
        fetched.append(reference)
        assert known(store, reference) is None, "an image with a damaged layer counted as being here"
        add(store, "one")

    found = scrub(store, mend=mend)
    assert fetched == [IMAGE] and found is not None and found.damaged[0].mended
    store.verify(layer.digest)
    assert known(store, IMAGE) is not None


def test_where_fetching_fails_the_remedy_says_why(store: LayerStore) -> None:
    layer = add(store, "one")
    image(store, layer.digest)
    spoil(store, layer.digest)

    def mend(reference: str) -> None:
        raise RegistryUnavailable("no route to registry.example")

    found = scrub(store, mend=mend)
    assert found is not None and not found.damaged[0].mended
    assert "no route" in found.damaged[0].remedy and IMAGE in found.damaged[0].remedy
    assert not store.intact(layer.digest)


def test_one_at_a_time_and_the_longest_unread_first(store: LayerStore) -> None:
    layers = [add(store, name) for name in ("one", "two", "three")]
    scrub(store)
    for age, layer in enumerate(reversed(layers)):
        os.utime(store.root / "verified" / layer.path.name, (age, age))
    with flock(store.root / "scrub.lock", fcntl.LOCK_EX):
        assert scrub(store) is None
    scrub(store, most=1)
    times = store.verified()
    assert sorted(layers, key=lambda layer: times[layer.digest]) == [layers[1], layers[0], layers[2]]


def test_it_keeps_to_its_rate_and_ends_when_told(store: LayerStore) -> None:
    add(store, "one")
    began = time.monotonic()
    scrub(store, rate=20 << 20)
    assert time.monotonic() - began >= 0.15
    stop = threading.Event()
    stop.set()
    found = scrub(store, stop=stop)
    assert found is not None and found.layers == 0


def test_what_is_removed_is_removed_with_its_mark(store: LayerStore) -> None:
    layer = add(store, "one")
    spoil(store, layer.digest)
    scrub(store)
    store.remove("one")
    collect(store, grace=0)
    assert not store.digests() and not layer.path.exists()
