from __future__ import annotations

import os
from pathlib import Path

import pytest

from barchan.cli.datadir import prepare, share
from barchan.config import Layout
from barchan.errors import InvalidRequest, LayerCorrupt
from barchan.layers import content
from barchan.layers.cache import ImageCache
from barchan.layers.store import Layer, LayerStore


def add(store: LayerStore, name: str) -> Layer:
    with store.temporary() as work:
        layer = work / "layer"
        layer.mkdir()
        (layer / "image").write_text(f"image of {name}")
        (layer / "data").write_text(f"data of {name}")
        content.finish(layer, "split")
        return store.add(layer, name)


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers", shared=True)


def test_an_image_is_copied_once(store: LayerStore, tmp_path: Path) -> None:
    layer = add(store, "one")
    cache = ImageCache(tmp_path / "images")
    path = cache.image(layer, store.check(layer))
    assert path.read_bytes() == (layer.path / "image").read_bytes() and path.stat().st_mode & 0o777 == 0o400
    inode = path.stat().st_ino
    (layer.path / "image").unlink()
    assert cache.image(layer, content.read(layer.path)).stat().st_ino == inode
    os.truncate(path, 5)
    with pytest.raises(FileNotFoundError):
        cache.image(layer, content.read(layer.path))


def test_a_damaged_image_gets_no_name(store: LayerStore, tmp_path: Path) -> None:
    layer = add(store, "one")
    (layer.path / "image").chmod(0o600)
    with (layer.path / "image").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(LayerCorrupt, match=layer.digest):
        ImageCache(tmp_path / "images").image(layer, store.check(layer))
    assert not list((tmp_path / "images").iterdir())


def test_what_was_not_mounted_for_longest_goes_first(store: LayerStore, tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "images", most=2 * content.UNIT)
    layers = [add(store, name) for name in ("one", "two", "three")]
    for age, layer in enumerate(layers[:2]):
        os.utime(cache.image(layer, store.check(layer)), (age, age))
    cache.image(layers[0], store.check(layers[0]))
    cache.image(layers[2], store.check(layers[2]))
    names = {f"sha256:{path.name}" for path in (tmp_path / "images").iterdir()}
    assert names == {layers[0].digest, layers[2].digest}


def test_content_of_a_shared_store_is_not_read_before_a_mount(store: LayerStore) -> None:
    layer = add(store, "one")
    data = layer.path / "data"
    data.chmod(0o600)
    with data.open("r+b") as file:
        file.write(b"x")
    store.check(layer)
    with pytest.raises(LayerCorrupt):
        LayerStore(store.root, shared=False).check(layer)
    os.truncate(data, 5)
    with pytest.raises(LayerCorrupt):
        store.check(layer)


def test_a_data_directory_takes_its_layers_from_elsewhere(tmp_path: Path) -> None:
    there, layout = tmp_path / "there", Layout(tmp_path / "data")
    there.mkdir()
    prepare(layout)
    share(layout, there)
    share(layout, there)
    store = LayerStore(layout.layers)
    assert store.shared and (there / "sha256").is_dir()
    (tmp_path / "other").mkdir()
    for wrong in (tmp_path / "other", tmp_path / "absent"):
        with pytest.raises(InvalidRequest) as refused:
            share(layout, wrong)
        assert refused.value.field == "layers"
    own = Layout(tmp_path / "own")
    prepare(own)
    assert not LayerStore(own.layers).shared
    with pytest.raises(InvalidRequest, match="has its layers at"):
        share(own, there)
