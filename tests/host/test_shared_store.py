"""A layer store on a shared file system: several nodes, each with its own mount of it in miniature, and only what is read travels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan.errors import LayerCorrupt
from barchan.layers.mount import LayerMounts
from barchan.layers.sources import import_layer
from barchan.layers.store import Layer, LayerStore
from barchan.spec import MIB
from tests.disks import real_disk
from tests.host.test_env_import import entries, make_contents
from tests.juicefs import JuiceFS, juicefs

LARGE = 32 * MIB
READER = "import sys; print(len(open(sys.argv[1], 'rb').read()), flush=True)"


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    with real_disk(full=True) as path:
        yield path


@pytest.fixture(scope="module")
def shared(disk: Path) -> Iterator[JuiceFS]:
    with juicefs(disk / "fs", options=("--prefetch", "0", "--max-readahead", "1")) as found:
        yield found


@pytest.fixture(scope="module")
def layer(shared: JuiceFS, disk: Path) -> Layer:
    """Imported by one node."""
    tree = disk / "tree"
    if not tree.exists():
        make_contents(tree)
        (tree / "large").write_bytes(os.urandom(LARGE))
        (tree / "other").write_bytes(os.urandom(LARGE))
    return import_layer(LayerStore(shared.root / "layers", shared=True, work=disk / "work"), "base", tree)


@contextmanager
def mounted(shared: JuiceFS, node: Path, layer: Layer) -> Iterator[Path]:
    """By a node with a data directory of its own."""
    layers = LayerMounts(node / "mnt", LayerStore(shared.root / "layers", shared=True, work=node / "work"))
    node.mkdir(exist_ok=True)
    layers.prepare()
    try:
        fd = layers.acquire(layer)
        try:
            yield Path(f"/proc/{os.getpid()}/fd/{fd}")
        finally:
            os.close(fd)
    finally:
        layers.unmount_all()


def test_another_node_sees_the_same(shared: JuiceFS, disk: Path, layer: Layer) -> None:
    shared.empty_cache()
    with mounted(shared, disk / "second", layer) as root:
        assert entries(root) == entries(disk / "tree")


def test_names_are_local_and_only_what_is_read_travels(shared: JuiceFS, disk: Path, layer: Layer) -> None:
    with mounted(shared, disk / "third", layer):
        pass
    shared.empty_cache()
    before = shared.fetched()
    with mounted(shared, disk / "third", layer) as root:
        found = list(root.iterdir())
        sizes = sum(path.lstat().st_size for path in found)
        assert sizes > 2 * LARGE and len(found) > 500
        listed = shared.fetched() - before
        assert (root / "large").read_bytes() == (disk / "tree/large").read_bytes()
        read = shared.fetched() - before - listed
    assert listed < MIB, "names and attributes were to come from the node's own cache"
    assert LARGE <= read < LARGE + 8 * MIB, "the other large file was not read"


def test_what_is_read_again_does_not_travel_again(shared: JuiceFS, disk: Path, layer: Layer) -> None:
    shared.empty_cache()
    with mounted(shared, disk / "fourth", layer) as root:
        (root / "large").read_bytes()
        before = shared.fetched()
        (root / "large").read_bytes()
        assert shared.fetched() - before < MIB // 16


def test_an_image_that_arrives_damaged_is_not_mounted(shared: JuiceFS, disk: Path, layer: Layer) -> None:
    image = layer.path / "image"
    right = image.read_bytes()
    image.chmod(0o600)
    try:
        image.write_bytes(right[:5000] + b"x" + right[5001:])
        with pytest.raises(LayerCorrupt, match=layer.digest), mounted(shared, disk / "fifth", layer):
            pass
        assert not list((disk / "fifth/cache/images").iterdir())
    finally:
        image.write_bytes(right)
    with mounted(shared, disk / "fifth", layer) as root:
        assert (root / "size-1").stat().st_size == 1


def test_a_reader_waits_while_the_store_is_gone_and_can_be_killed(shared: JuiceFS, disk: Path, layer: Layer) -> None:
    shared.empty_cache()
    with mounted(shared, disk / "sixth", layer) as root:
        argv = [sys.executable, "-c", READER, str(root / "large")]
        shared.link.cut()
        try:
            first, second = (subprocess.Popen(argv, stdout=subprocess.PIPE) for _ in range(2))
            for reader in (first, second):
                with pytest.raises(subprocess.TimeoutExpired):
                    reader.wait(1)
            second.send_signal(signal.SIGKILL)
            assert second.wait(20) == -signal.SIGKILL
        finally:
            shared.link.restore()
        output, _ = first.communicate(timeout=90)
        second.communicate()
        assert output == f"{LARGE}\n".encode()


def test_locks_hold_between_mounts(shared: JuiceFS, disk: Path) -> None:
    """Two clients of the same file system, as on two hosts."""
    place = disk / "second-mount"
    place.mkdir()
    other = JuiceFS(disk / "other", place, disk / "other-cache", 64, shared.endpoint, shared.link, ())
    other.work.mkdir()
    (other.work / "meta.db").symlink_to(shared.work / "meta.db")
    script = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    (shared.root / "lock").touch()
    other.mount()
    try:
        argv = [sys.executable, "-c", script]
        with subprocess.Popen(
            [*argv, str(shared.root / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdin and holder.stdout and holder.stdout.readline() == b"1\n"
            try_it = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
            wanted = [sys.executable, "-c", try_it, str(place / "lock")]
            assert b"BlockingIOError" in subprocess.run(wanted, capture_output=True, check=False).stderr
            holder.stdin.close()
            holder.wait(20)
            subprocess.run(wanted, check=True)
    finally:
        other.unmount()
