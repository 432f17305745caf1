"""Layers on this host's kernel: one superblock each, whoever restarts, and nothing mounted that is not what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan.config import Layout
from barchan.errors import LayerCorrupt
from barchan.kernel import loops, mounts, probe, syscalls
from barchan.layers.attach import attach
from barchan.layers.mount import LayerMounts
from barchan.layers.sources import import_layer
from barchan.layers.store import Layer, LayerStore
from tests.disks import real_disk

PROGRAM = """
import os, sys
from pathlib import Path
from barchan.layers.mount import LayerMounts
from barchan.layers.store import LayerStore
store = LayerStore(Path(sys.argv[1]))
layers = LayerMounts(Path(sys.argv[2]), store, reduced=sys.argv[3] == "reduced")
layers.prepare()
fd = layers.acquire(store.resolve("base"))
print(os.fstat(fd).st_dev, flush=True)
sys.stdin.read()
"""
Make = Callable[[], LayerMounts]


@pytest.fixture
def data() -> Iterator[Path]:
    with real_disk() as path:
        yield path


@pytest.fixture
def store(data: Path) -> LayerStore:
    return LayerStore(data / "layers")


@pytest.fixture
def layer(store: LayerStore, data: Path) -> Layer:
    tree = data / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/hello").write_text("hello")
    (tree / "big").write_bytes(os.urandom(1 << 20))
    return import_layer(store, "base", tree)


@pytest.fixture(params=["file", "reduced"])
def kind(request: pytest.FixtureRequest, data: Path) -> str:
    if request.param == "file" and probe.examine(Layout(data / "probe")).kernel != "full":
        pytest.skip("this kernel mounts no EROFS image from its file")
    return str(request.param)


@pytest.fixture
def make(data: Path, store: LayerStore, kind: str) -> Iterator[Make]:
    """A new object each time, as a restarted agent has."""

    def make() -> LayerMounts:
        layers = LayerMounts(data / "mnt", store, reduced=kind == "reduced")
        layers.prepare()
        return layers

    try:
        yield make
    finally:
        make().unmount_all()


def device(layers: LayerMounts, layer: Layer) -> int:
    fd = layers.acquire(layer)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def mounted_below(data: Path) -> list[str]:
    return [mount.path for mount in mounts.current() if mount.path.startswith(str(data))]


def test_clone_shows_the_content_read_only(make: Make, layer: Layer) -> None:
    fd = make().acquire(layer)
    try:
        root = Path(f"/proc/self/fd/{fd}")
        assert (root / "etc/hello").read_text() == "hello"
        with pytest.raises(OSError, match="Read-only"):
            (root / "new").touch()
        assert os.fstatvfs(fd).f_flag & (os.ST_NODEV | os.ST_NOSUID) == os.ST_NODEV | os.ST_NOSUID
    finally:
        os.close(fd)


def test_restart_finds_the_same_superblock(make: Make, layer: Layer, data: Path) -> None:
    first = device(make(), layer)
    again = make()
    assert again.mounted() == {layer.digest}
    assert device(again, layer) == first
    assert len([path for path in mounted_below(data) if path.endswith(layer.path.name)]) == 1


def test_second_mount_is_shared_only_over_a_loop_device(make: Make, layer: Layer, kind: str) -> None:
    """The control of the test above: for a file the kernel does not share by itself, so a mount must be found again."""
    held = make().acquire(layer)
    fd = attach(layer.path / "image", layer.path / "data", reduced=kind == "reduced")
    try:
        assert (os.fstat(fd).st_dev == os.fstat(held).st_dev) == (kind == "reduced")
    finally:
        os.close(fd)
        os.close(held)


def test_kill_9_leaves_the_mount_to_the_next_agent(make: Make, layer: Layer, data: Path, kind: str) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(data / "layers"), str(data / "mnt"), kind]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as child:
        assert child.stdout
        seen = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        assert child.wait(10) == -9
    assert device(make(), layer) == seen


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_many_at_once_mount_it_once(make: Make, layer: Layer, data: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        devices = set(pool.map(lambda _: device(make(), layer), range(32)))
    assert len(devices) == 1
    assert mounted_below(data / "mnt") == [str(data / "mnt"), str(data / "mnt" / layer.path.name)]


@contextmanager
def shared(path: Path) -> Iterator[None]:
    """What systemd makes of the root: mounts below it reach every service's namespace."""
    syscalls.bind(path, path)
    fd = syscalls.open_tree(path)
    try:
        syscalls.set_mount_attributes(fd, propagation=1 << 20)
        yield
    finally:
        os.close(fd)
        syscalls.unmount(path)


def test_mounts_do_not_reach_other_namespaces(layer: Layer, data: Path, store: LayerStore) -> None:
    """A service with a namespace of its own would otherwise pin every layer. The tmpfs shows that it could."""
    argv = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", "echo; read x; cat /proc/self/mountinfo"]
    layers = LayerMounts(data / "mnt", store, reduced=True)
    (data / "control").mkdir()
    with shared(data), subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdout.readline() == b"\n"
        layers.prepare()
        device(layers, layer)
        fd = syscalls.new_mount("tmpfs", ())
        syscalls.move_mount(fd, data / "control")
        os.close(fd)
        table, _ = child.communicate(b"\n")
        syscalls.unmount(data / "control")
        layers.unmount_all()
    assert str(data / "control") in table.decode()
    assert layer.path.name not in table.decode()


@pytest.mark.parametrize(
    ("file", "at"),
    [("image", 1024), ("image", 1030), ("data", 500_000)],
    ids=["magic", "checksum", "content"],
)
def test_corrupt_layer_is_refused_and_not_mounted(make: Make, layer: Layer, data: Path, file: str, at: int) -> None:
    flip(layer.path / file, at)
    layers = make()
    for _ in range(2):
        with pytest.raises(LayerCorrupt) as caught:
            layers.acquire(layer)
        assert layer.digest in caught.value.message
        assert caught.value.hint
    assert layers.mounted() == frozenset()
    assert mounted_below(data / "mnt") == [str(data / "mnt")]
    assert not looped(layer)
    flip(layer.path / file, at)
    device(layers, layer)


def test_kernel_refuses_a_superblock_that_passed_as_verified(make: Make, layer: Layer, store: LayerStore) -> None:
    """Bits that rot without a change of the file's time: the superblock's checksum is the last line."""
    store.check(layer)
    image = layer.path / "image"
    before = image.stat()
    flip(image, 1060)
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))
    layers = make()
    with pytest.raises(LayerCorrupt):
        layers.acquire(layer)
    assert layers.mounted() == frozenset()


def looped(layer: Layer) -> bool:
    return any(loops.find(layer.path / name) for name in ("image", "data"))


def flip(path: Path, at: int) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_the_layers_meant_are_unmounted_and_others_kept(
    make: Make, layer: Layer, store: LayerStore, data: Path
) -> None:
    (data / "tree/more").write_text("more")
    other = import_layer(store, "other", data / "tree")
    layers = make()
    device(layers, layer)
    device(layers, other)
    layers.close({other.digest})
    assert layers.mounted() == {layer.digest}
    assert not looped(other)


def test_on_a_file_system_that_knows_no_mounts_of_files_loop_devices_are_used(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if probe.examine(Layout(data / "probe")).kernel != "full":
        pytest.skip("this kernel mounts no EROFS image from its file")
    (data / "memory").mkdir()
    fd = syscalls.new_mount("tmpfs", ())
    syscalls.move_mount(fd, data / "memory")
    os.close(fd)
    try:
        (data / "tree").mkdir()
        (data / "tree/hello").write_text("hello")
        store = LayerStore(data / "memory/layers")
        layer = import_layer(store, "base", data / "tree")
        layers = LayerMounts(data / "mnt", store)
        layers.prepare()
        try:
            fd = layers.acquire(layer)
            assert Path(f"/proc/self/fd/{fd}/hello").read_text() == "hello"
            os.close(fd)
            assert looped(layer)
            assert "loop devices" in caplog.text
        finally:
            layers.unmount_all()
        assert not looped(layer)
    finally:
        syscalls.unmount(data / "memory")


def test_clone_outlives_the_unmount(make: Make, layer: Layer) -> None:
    layers = make()
    fd = layers.acquire(layer)
    try:
        layers.unmount_all()
        assert Path(f"/proc/self/fd/{fd}/etc/hello").read_text() == "hello"
    finally:
        os.close(fd)


def test_everything_is_undone_and_may_be_undone_twice(make: Make, layer: Layer, data: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    layers = make()
    device(layers, layer)
    layers.unmount_all()
    layers.unmount_all()
    assert mounted_below(data) == []
    assert not looped(layer)
    assert len(os.listdir("/proc/self/fd")) == before


def test_missing_feature_is_named(data: Path, store: LayerStore, layer: Layer) -> None:
    with pytest.raises(OSError, match=r"mount nosuchfs|fsopen nosuchfs") as caught:
        syscalls.new_mount("nosuchfs", ())
    assert caught.value.errno == 19


def test_kernel_says_what_is_wrong_with_an_option(data: Path) -> None:
    with pytest.raises(OSError, match="nosuchoption") as caught:
        syscalls.new_mount("tmpfs", (("nosuchoption", "1"),))
    assert caught.value.errno == 22


def test_probe_finds_out_and_leaves_nothing(data: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    report = probe.examine(Layout(data))
    assert report.kernel in ("full", "reduced")
    assert {check.name for check in report.checks} >= {"btrfs", "user namespaces", "seccomp", "cgroup controllers"}
    assert all(check.remedy and check.detail for check in report.missing())
    assert list(data.iterdir()) == []
    assert mounted_below(data) == []
    assert len(os.listdir("/proc/self/fd")) == before
