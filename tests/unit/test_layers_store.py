from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from barchan.errors import EnvironmentNotFound, InvalidRequest, LayerCorrupt
from barchan.layers import content
from barchan.layers.gc import collect
from barchan.layers.store import Layer, LayerStore


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers")


def make(layer: Path, text: bytes) -> content.Content:
    """As much of a layer as the store looks at."""
    layer.mkdir()
    (layer / "image").write_bytes(b"image of " + text)
    (layer / "data").write_bytes(b"data of " + text)
    return content.finish(layer, "split")


def add(store: LayerStore, name: str, text: bytes) -> Layer:
    with store.temporary() as work:
        make(work / "layer", text)
        return store.add(work / "layer", name, source="here", kind="test")


def files(store: LayerStore) -> list[str]:
    return sorted(path.name for path in (store.root / "sha256").iterdir())


def test_added_image_is_found_by_name_version_and_digest(store: LayerStore) -> None:
    layer = add(store, "base", b"one")
    assert layer.version == 1
    assert store.resolve("base") == store.resolve("base@1") == layer
    assert store.resolve(layer.digest).path == layer.path
    assert (layer.path / "data").read_bytes() == b"data of one".ljust(2 << 20, b"\0")
    assert {path.name: path.stat().st_mode & 0o777 for path in layer.path.iterdir()} == dict.fromkeys(
        ("layer.json", "image", "data"), 0o400
    )
    assert layer.size == len(b"image of one" + b"data of one")
    assert not list((store.root / "tmp").iterdir())


def test_versions_count_up_and_newest_wins(store: LayerStore) -> None:
    first, second = add(store, "base", b"one"), add(store, "base", b"two")
    assert (first.version, second.version) == (1, 2)
    assert store.resolve("base") == second
    assert store.resolve("base@1") == first
    assert [(e.name, e.version, e.kind) for e in store.catalog.entries()] == [("base", 1, "test"), ("base", 2, "test")]


def test_ten_versions_are_ordered_as_numbers(store: LayerStore) -> None:
    for number in range(11):
        add(store, "base", b"%d" % number)
    assert store.resolve("base").version == 11


def test_same_content_again_is_the_same_layer(store: LayerStore) -> None:
    first = add(store, "base", b"one")
    inode = first.path.stat().st_ino
    assert add(store, "base", b"one") == first
    other = add(store, "other", b"one")
    assert (other.digest, other.version) == (first.digest, 1)
    assert len(files(store)) == 1
    assert first.path.stat().st_ino == inode


def test_going_back_to_older_content_is_a_new_version(store: LayerStore) -> None:
    first = add(store, "base", b"one")
    add(store, "base", b"two")
    again = add(store, "base", b"one")
    assert (again.digest, again.version) == (first.digest, 3)
    assert len(files(store)) == 2


def test_cut_short_copy_is_replaced_when_added_again(store: LayerStore) -> None:
    layer = add(store, "base", b"one")
    os.truncate(layer.path / "data", 100)
    add(store, "base", b"one")
    store.verify(layer.digest)


@pytest.mark.parametrize(
    ("ref", "hint"), [("debain-12", "debian-12"), ("zzz", "known: debian-12"), ("debian-12@7", "versions: 1")]
)
def test_unknown_name_tells_near_ones(store: LayerStore, ref: str, hint: str) -> None:
    add(store, "debian-12", b"one")
    with pytest.raises(EnvironmentNotFound) as caught:
        store.resolve(ref, "environment.base")
    assert hint in caught.value.hint
    assert caught.value.field == "environment.base"


def test_empty_store_tells_how_to_begin(store: LayerStore) -> None:
    with pytest.raises(EnvironmentNotFound) as caught:
        store.resolve("debian-12")
    assert "bootstrap" in caught.value.hint


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "A", "a..b", "x" * 65])
def test_wrong_name_is_refused_before_anything_is_written(store: LayerStore, name: str) -> None:
    with pytest.raises(InvalidRequest):
        add(store, name, b"one")
    assert not files(store)
    with pytest.raises(InvalidRequest):
        store.resolve(name)


@pytest.mark.parametrize(("name", "at"), [("image", 3000), ("data", 3000), ("layer.json", 100)])
def test_changed_content_is_noticed_and_named(store: LayerStore, name: str, at: int) -> None:
    layer = add(store, "base", b"one")
    store.check(layer)
    (layer.path / name).chmod(0o600)
    with (layer.path / name).open("r+b") as file:
        file.seek(at)
        file.write(b"x")
    with pytest.raises(LayerCorrupt) as caught:
        store.check(layer)
    assert layer.digest in caught.value.message
    assert caught.value.hint
    with pytest.raises(LayerCorrupt):
        store.check(layer)


def test_content_is_hashed_once_and_again_when_the_file_changed(store: LayerStore) -> None:
    layer = add(store, "base", b"one")
    stamp = store.root / "verified" / layer.path.stem
    assert not stamp.exists(), "content that was never read back counts as verified"
    store.check(layer)
    before = stamp.stat().st_mtime_ns
    store.check(layer)
    assert stamp.stat().st_mtime_ns == before
    os.utime(layer.path / "data", ns=(1, 1))
    store.check(layer)
    assert stamp.stat().st_mtime_ns != before


@pytest.mark.parametrize("name", ["image", "data", "layer.json"])
def test_a_file_that_is_missing_or_cut_short_is_noticed_whatever_was_hashed(store: LayerStore, name: str) -> None:
    layer = add(store, "base", b"one")
    store.check(layer)
    os.truncate(layer.path / name, 5)
    with pytest.raises(LayerCorrupt, match=layer.digest):
        store.check(layer)
    (layer.path / name).unlink()
    with pytest.raises(LayerCorrupt, match=layer.digest):
        store.check(layer)


def test_digest_is_that_of_the_record_and_covers_both_files(tmp_path: Path) -> None:
    one = make(tmp_path / "one", b"one")
    assert one.digest == "sha256:" + content.digest_of(tmp_path / "one" / "layer.json")
    assert one.digest == make(tmp_path / "again", b"one").digest
    (tmp_path / "other").mkdir()
    (tmp_path / "other/image").write_bytes(b"image of one")
    (tmp_path / "other/data").write_bytes(b"data of two")
    assert content.finish(tmp_path / "other", "split").digest != one.digest
    assert {blob.size for blob in one.files.values()} == {content.UNIT}


def test_missing_layer_is_corrupt_under_a_name_and_unknown_by_digest(store: LayerStore) -> None:
    layer = add(store, "base", b"one")
    shutil.rmtree(layer.path)
    with pytest.raises(LayerCorrupt):
        store.resolve("base")
    with pytest.raises(EnvironmentNotFound):
        store.resolve(layer.digest)


def test_remove_takes_only_what_no_name_needs(store: LayerStore) -> None:
    shared, own = add(store, "a", b"one"), add(store, "a", b"two")
    add(store, "b", b"one")
    store.remove("a")
    assert len(files(store)) == 2, "somebody may have resolved it just now"
    collect(store, grace=0)
    assert files(store) == [shared.path.name]
    assert not own.path.exists()
    with pytest.raises(EnvironmentNotFound):
        store.resolve("a")
    with pytest.raises(EnvironmentNotFound):
        store.remove("a")
    store.remove("b@1")
    collect(store, grace=0)
    assert not files(store)


def add_and_remove(root: Path, worker: int) -> None:
    store = LayerStore(root)
    for number in range(30):
        layer = add(store, f"name{worker}", b"shared %d" % (number % 3))
        assert store.resolve(f"name{worker}").path.exists(), layer
        store.remove(f"name{worker}")
        collect(store, grace=0)


def test_removing_never_takes_a_layer_that_is_being_added(store: LayerStore) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        list(pool.map(add_and_remove, [store.root] * 4, range(4)))
    assert not files(store)


def test_sweep_removes_only_what_no_process_owns(store: LayerStore) -> None:
    tmp = store.root / "tmp"
    with store.temporary() as mine:
        here = mine.name.partition("-")[0]
        for name in (f"{here}-99999999-gone", "elsewhere-1-working", "elsewhere-2-gone"):
            (tmp / name).mkdir()
        long_ago = time.time() - 2 * 86400
        os.utime(tmp / "elsewhere-2-gone", (long_ago, long_ago))
        store.sweep()
        assert {path.name for path in tmp.iterdir()} == {mine.name, "elsewhere-1-working"}


def add_many(root: Path, worker: int) -> None:
    store = LayerStore(root)
    for number in range(10):
        add(store, "base", b"%d-%d" % (worker, number))


def test_processes_may_add_at_once(store: LayerStore) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        list(pool.map(add_many, [store.root] * 4, range(4)))
    assert [entry.version for entry in store.catalog.entries()] == list(range(1, 41))
    assert len({entry.digest for entry in store.catalog.entries()}) == len(files(store)) == 40


def test_directories_and_files_are_closed_to_others(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        (tmp_path / "layers").mkdir(0o755)
        store = LayerStore(tmp_path / "layers")
        add(store, "base", b"one")
        with store.temporary() as work:
            entries = [store.root, work, *store.root.rglob("*")]
            assert not [path for path in entries if path.stat().st_mode & 0o077]
    finally:
        os.umask(old)
