"""What was read of a layer, told by the page cache, and read ahead again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan.errors import LayerCorrupt
from barchan.kernel import residency
from barchan.layers import access, gc, prefetch
from barchan.layers.access import LayerAccess
from barchan.layers.mount import LayerMounts
from barchan.layers.sources import import_layer
from barchan.layers.store import Layer, LayerStore

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def store(disk: Path) -> LayerStore:
    return LayerStore(disk / "layers")


@pytest.fixture
def layer(store: LayerStore, disk: Path) -> Layer:
    tree = disk / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/hosts").write_text("localhost")
    (tree / "big").write_bytes(os.urandom(8 * MIB))
    (tree / "new\nline").write_bytes(os.urandom(3 * PAGE + 1))
    (tree / "empty").touch()
    (tree / "one").write_bytes(b"x" * PAGE)
    (tree / "other").hardlink_to(tree / "one")
    (tree / "link").symlink_to("/etc/passwd")
    return import_layer(store, "base", tree)


@pytest.fixture
def mounts(store: LayerStore, disk: Path) -> Iterator[LayerMounts]:
    mounts = LayerMounts(disk / "mnt", store)
    mounts.prepare()
    yield mounts
    mounts.unmount_all()


@contextmanager
def mounted(mounts: LayerMounts, layer: Layer) -> Iterator[Path]:
    fd = mounts.acquire(layer)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def seen(mounts: LayerMounts, layer: Layer) -> LayerAccess:
    (found,) = access.profile(mounts, [layer])
    return found


def read(root: Path, name: str, offset: int, length: int) -> None:
    """Without read-ahead."""
    with (root / name).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), length, offset)


def test_a_layer_that_is_not_mounted_was_not_read(mounts: LayerMounts, layer: Layer) -> None:
    assert seen(mounts, layer) == LayerAccess(digest=layer.digest, mounted=False)


def test_a_profile_reads_nothing(mounts: LayerMounts, layer: Layer) -> None:
    with mounted(mounts, layer):
        for _ in range(2):
            found = seen(mounts, layer)
            assert (found.read, found.bytes_read) == ((), 0)
        assert (found.files, found.size) == (5, 9 + 8 * MIB + 3 * PAGE + 1 + PAGE)


def test_what_was_read_is_told_by_file_and_place(mounts: LayerMounts, layer: Layer) -> None:
    with mounted(mounts, layer) as root:
        read(root, "big", 5 * MIB, 2 * PAGE)
        read(root, "big", PAGE, 1)
        (root / "new\nline").read_bytes()
        (root / "other").read_bytes()
        found = {file.path: file for file in seen(mounts, layer).read}
    assert found[b"big"].ranges == ((PAGE, PAGE), (5 * MIB, 2 * PAGE))
    assert found[b"big"].read == 3 * PAGE
    assert found[b"new\nline"].ranges == ((0, 3 * PAGE + 1),)
    (linked,) = found.keys() - {b"big", b"new\nline"}
    assert linked in (b"one", b"other")
    assert found[linked].read == PAGE


def test_to_begin_anew(mounts: LayerMounts, layer: Layer) -> None:
    with mounted(mounts, layer) as root:
        (root / "big").read_bytes()
        assert seen(mounts, layer).bytes_read == 8 * MIB
        access.forget(mounts, [layer])
        assert seen(mounts, layer).read == ()


def test_a_layer_with_a_list_is_read_ahead_when_it_is_mounted(
    store: LayerStore, mounts: LayerMounts, layer: Layer
) -> None:
    with mounted(mounts, layer) as root:
        read(root, "big", 5 * MIB, 2 * PAGE)
        before = seen(mounts, layer)
    prefetch.save(store, before)
    mounts.close([layer.digest])
    with mounted(mounts, layer):
        assert until(lambda: seen(mounts, layer) == before)


def test_a_damaged_list_does_no_harm(store: LayerStore, mounts: LayerMounts, layer: Layer) -> None:
    prefetch.save(store, LayerAccess(digest=layer.digest, mounted=True))
    (damaged,) = store.prefetch.iterdir()
    damaged.write_bytes(b"{")
    with pytest.raises(LayerCorrupt):
        prefetch.load(store, layer.digest)
    with mounted(mounts, layer) as root:
        assert (root / "etc/hosts").read_text() == "localhost"


def until(holds: Callable[[], bool]) -> bool:
    """The kernel reads beside us, and tells nobody."""
    deadline = time.monotonic() + 60
    while not (done := holds()) and time.monotonic() < deadline:
        continue
    return done


def test_what_was_read_once_is_read_ahead(store: LayerStore, mounts: LayerMounts, layer: Layer) -> None:
    with mounted(mounts, layer) as root:
        read(root, "big", 5 * MIB, 2 * PAGE)
        (root / "etc/hosts").read_bytes()
        before = seen(mounts, layer)
        made = prefetch.save(store, before)
        assert made.size == 2 * PAGE + 9
        access.forget(mounts, [layer])
        wanted = prefetch.load(store, layer.digest)
        assert wanted == made
        fd = mounts.acquire(layer)
        try:
            assert prefetch.fetch(fd, wanted) == made.size
        finally:
            os.close(fd)
        assert until(lambda: seen(mounts, layer) == before)


def test_a_list_that_fits_no_layer_does_no_harm(mounts: LayerMounts, layer: Layer) -> None:
    wrong = (b"link", b"gone", b"../../etc/passwd", b"/etc/passwd", b"")
    wanted = prefetch.PrefetchList(files=tuple(prefetch.Wanted(path=path, ranges=((0, 1 << 40),)) for path in wrong))
    fd = mounts.acquire(layer)
    try:
        assert prefetch.fetch(fd, wanted) == 0
    finally:
        os.close(fd)


def test_a_list_goes_with_its_layer(store: LayerStore, mounts: LayerMounts, layer: Layer) -> None:
    with mounted(mounts, layer) as root:
        (root / "big").read_bytes()
        prefetch.save(store, seen(mounts, layer))
    gc.collect(store, grace=0)
    assert prefetch.load(store, layer.digest) is not None
    store.remove("base")
    gc.collect(store, grace=0)
    assert prefetch.load(store, layer.digest) is None


def test_no_list(store: LayerStore, layer: Layer) -> None:
    assert prefetch.load(store, layer.digest) is None
    prefetch.remove(store, layer.digest)


def test_ranges_of_a_file_with_holes_in_the_cache(disk: Path) -> None:
    path = disk / "file"
    path.write_bytes(bytes(10 * PAGE + 5))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        residency.forget(file.fileno())
        assert residency.resident(file.fileno(), 10 * PAGE + 5) == ()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for page in (0, 2, 3, 10):
            os.pread(file.fileno(), 1, page * PAGE)
        assert residency.resident(file.fileno(), 10 * PAGE + 5) == (
            (0, PAGE),
            (2 * PAGE, 2 * PAGE),
            (10 * PAGE, 5),
        )
        assert residency.resident(file.fileno(), 0) == ()
