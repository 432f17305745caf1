"""From a directory or tar to a mounted layer: the tree comes out as it went in, and the same tree is the same layer."""

from __future__ import annotations

import os
import random
import socket
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from barchan.config import Layout
from barchan.errors import CreateFailed, FeatureMissing, InvalidRequest, NodeStorageFull
from barchan.kernel import loops, mounts, probe, syscalls
from barchan.layers import bootstrap, content, erofs
from barchan.layers.content import FORMATS, Format
from barchan.layers.mount import LayerMounts
from barchan.layers.sources import import_layer
from barchan.layers.store import LayerStore
from barchan.spec import MIB
from tests import debian, erofs_utils
from tests.disks import real_disk

EPOCH = 1_700_000_000
Entry = tuple[int, int, int, int, bytes, dict[str, bytes]]


@pytest.fixture
def data() -> Iterator[Path]:
    with real_disk() as path:
        yield path
        for below in (path / "host", path / "tree/mounted"):
            while mounts.top(below):
                syscalls.unmount(below)


@pytest.fixture
def store(data: Path) -> LayerStore:
    return LayerStore(data / "layers")


@pytest.fixture
def tree(data: Path) -> Path:
    return make_tree(data / "tree")


def make_tree(root: Path) -> Path:
    """One of everything that a layer may hold."""
    (root / "bin").mkdir(parents=True)
    (root / "bin/su").write_bytes(b"\x7fELF")
    (root / "bin/su").chmod(0o4755)
    os.link(root / "bin/su", root / "bin/hard")
    os.symlink("/etc/passwd", root / "absolute")
    os.symlink("../../up", root / "bin/relative")
    os.mkfifo(root / "fifo", 0o600)
    os.mknod(root / "bin/gone", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    (root / "empty").mkdir(mode=0o1777)
    (root / "empty").chmod(0o1777)
    (root / "big").write_bytes(bytes(range(256)) * 5000)
    (root / "owned").write_text("x")
    os.chown(root / "owned", 1000, 65534)
    os.setxattr(root / "owned", "user.note", b"\x00binary")
    os.setxattr(root / "owned", "security.capability", bytes.fromhex("0000000200200000000000000000000000000000"))
    odd = os.fsencode(root) + b"/od\xff\xfed \n\x1b[31m"
    Path(os.fsdecode(odd)).write_text("odd")
    for number in range(300):
        (root / "empty" / f"{number:03}").write_text(str(number))
    for path in (root, *root.rglob("*")):
        os.utime(path, (EPOCH, EPOCH), follow_symlinks=False)
    return root


def entries(root: Path) -> dict[bytes, Entry]:
    """Everything about a tree that a program could see, by relative name."""
    found = {}
    top = os.fsencode(root)
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            found[os.path.relpath(path, top)] = entry(path)
    return found


def entry(path: bytes) -> Entry:
    at = os.lstat(path)
    content = b""
    if stat.S_ISREG(at.st_mode):
        content = Path(os.fsdecode(path)).read_bytes()
    elif stat.S_ISLNK(at.st_mode):
        content = os.readlink(path)
    attributes = {
        name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)
    }
    links = at.st_nlink if not stat.S_ISDIR(at.st_mode) else 0
    return at.st_mode, at.st_uid << 32 | at.st_gid, links, int(at.st_mtime), content, attributes


def test_tree_comes_out_as_it_went_in(store: LayerStore, tree: Path, data: Path) -> None:
    layer = import_layer(store, "base", tree)
    layers = LayerMounts(data / "mnt", store, reduced=probe.examine(Layout(data / "probe")).kernel == "reduced")
    layers.prepare()
    try:
        fd = layers.acquire(layer)
        try:
            assert entries(Path(f"/proc/self/fd/{fd}")) == entries(tree)
        finally:
            os.close(fd)
    finally:
        layers.unmount_all()


def make_contents(root: Path) -> Path:
    """What chunks and clusters could get wrong: sizes around them, holes, equal contents, names, times."""
    number = random.Random(5)
    root.mkdir()
    for size in (0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 200_001, 2 * MIB + 1):
        (root / f"size-{size}").write_bytes(number.randbytes(size))
    same = number.randbytes(100_000)
    for name in ("one", "two"):
        (root / name).write_bytes(same)
    (root / "begins-alike").write_bytes(same[:65536] + b"and ends otherwise")
    (root / "zeros").write_bytes(bytes(300_000))
    for name, at, size in (("hole", 3 * MIB, 8 * MIB), ("ends-in-a-hole", 0, 4 * MIB), ("nothing-but-a-hole", -1, MIB)):
        with (root / name).open("wb") as file:
            if at >= 0:
                file.seek(at)
                file.write(number.randbytes(70_000))
            file.truncate(size)
    os.link(root / "size-200001", root / "second-name")
    (root / ("n" * 254)).write_bytes(b"long")
    os.symlink("t" * 4000, root / "long-link")
    os.setxattr(root / "one", "user.long", number.randbytes(3000))
    for index in range(500):
        (root / f"small-{index}").write_bytes(number.randbytes(number.randrange(300)))
    for path in root.iterdir():
        os.utime(path, ns=(0, EPOCH * 10**9 + number.randrange(10**9)), follow_symlinks=False)
    os.utime(root, (EPOCH + 1, EPOCH + 1))  # times in the image's own second are cut to whole seconds
    return root


def times(root: Path) -> dict[str, int]:
    return {path.name: path.lstat().st_mtime_ns for path in root.iterdir()}


@pytest.fixture(params=["here", "trixie"])
def mkfs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The host's mkfs.erofs, and a newer one."""
    if request.param != "here":
        try:
            monkeypatch.setenv("PATH", f"{erofs_utils.fetch(request.param)}:{os.environ['PATH']}")
        except debian.Unavailable as error:
            pytest.skip(str(error))
    erofs._help.cache_clear()
    yield str(request.param)
    erofs._help.cache_clear()


@pytest.mark.usefixtures("mkfs")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["file", "reduced"])
def test_every_content_comes_out_as_it_went_in(store: LayerStore, data: Path, format: Format, kind: str) -> None:
    if kind == "file" and probe.examine(Layout(data / "probe")).kernel == "reduced":
        pytest.skip("this kernel mounts no EROFS image from its file")
    tree = make_contents(data / "contents")
    layer = import_layer(store, "base", tree, format=format)
    layers = LayerMounts(data / "mnt", store, reduced=kind == "reduced")
    layers.prepare()
    try:
        fd = layers.acquire(layer)
        try:
            root = Path(f"/proc/self/fd/{fd}")
            assert entries(root) == entries(tree)
            assert times(root) == times(tree)
        finally:
            os.close(fd)
    finally:
        layers.unmount_all()


@pytest.mark.usefixtures("mkfs")
@pytest.mark.parametrize("format", FORMATS)
def test_the_same_contents_are_the_same_bytes(store: LayerStore, data: Path, format: Format) -> None:
    """Also when the directory gives its names in another order, and whatever runs in parallel."""
    tree = make_contents(data / "contents")
    layer = import_layer(store, "base", tree, format=format)
    subprocess.run(["cp", "-a", str(tree), str(data / "copy")], check=True)
    assert import_layer(store, "base", data / "copy", format=format) == layer
    found = content.read(layer.path, layer.digest)
    assert (found.format, found.data is not None) == (format, format == "split")
    assert all(blob.size % (2 * MIB) == 0 for blob in found.files.values())
    assert sorted(os.listdir(layer.path)) == sorted([*found.files, "layer.json"])


def test_formats_are_different_layers_and_packed_is_smaller(store: LayerStore, data: Path) -> None:
    tree = data / "text"
    tree.mkdir()
    (tree / "text").write_text("".join(f"line {number} of many\n" for number in range(200_000)))
    split, packed = (import_layer(store, "text", tree, format=format) for format in FORMATS)
    assert (split.version, packed.version) == (1, 2)
    assert packed.size < split.size / 2


def test_importing_again_is_the_same_layer(store: LayerStore, tree: Path, data: Path) -> None:
    first = import_layer(store, "base", tree)
    assert import_layer(store, "base", tree) == first
    copy = make_tree(data / "elsewhere")
    assert import_layer(store, "base", copy) == first
    assert len(list((store.root / "sha256").iterdir())) == 1
    assert [entry.version for entry in store.catalog.entries()] == [1]


@pytest.mark.parametrize("change", ["content", "mode", "owner", "name", "attribute", "time"])
def test_any_change_is_another_layer(store: LayerStore, tree: Path, change: str) -> None:
    """The control of the test above."""
    first = import_layer(store, "base", tree)
    path = tree / "owned"
    if change == "content":
        path.write_text("y")
    elif change == "mode":
        path.chmod(0o600)
    elif change == "owner":
        os.chown(path, 1, 1)
    elif change == "name":
        path = path.rename(tree / "other")
    elif change == "attribute":
        os.setxattr(path, "user.note", b"other")
    os.utime(path, (EPOCH, EPOCH - (change == "time")))
    os.utime(tree, (EPOCH, EPOCH))
    second = import_layer(store, "base", tree)
    assert second.digest != first.digest
    assert second.version == 2


def test_epoch_makes_fresh_copies_equal(store: LayerStore, tree: Path) -> None:
    first = import_layer(store, "base", tree, epoch=EPOCH)
    (tree / "owned").touch()
    assert import_layer(store, "base", tree).digest != first.digest
    assert import_layer(store, "base", tree, epoch=EPOCH).digest == first.digest


@pytest.mark.parametrize("end", ["tar", "tar.gz", "tar.xz"])
def test_tar_of_a_tree_is_the_same_layer_as_the_tree(store: LayerStore, tree: Path, data: Path, end: str) -> None:
    for path in (tree / "owned", tree / "bin/gone"):
        path.unlink()  # tarfile writes neither attributes nor whiteouts as a layer needs them
    for path in (tree, tree / "bin"):
        os.utime(path, (EPOCH, EPOCH))
    archive = data / f"tree.{end}"
    mode: Any = "w:" + end.partition("tar")[2].lstrip(".")
    with tarfile.open(archive, mode) as tar:
        tar.add(tree, ".")
    assert import_layer(store, "a", archive).digest == import_layer(store, "b", tree).digest
    assert not list((store.root / "tmp").iterdir())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (stat.S_IFCHR, "'bin/bad' is a character device"),
        (stat.S_IFBLK, "'bin/bad' is a block device"),
        (stat.S_IFSOCK, "'bin/bad' is a socket"),
    ],
)
def test_what_no_layer_may_hold_is_refused_by_name(store: LayerStore, tree: Path, kind: int, said: str) -> None:
    path = tree / "bin/bad"
    if kind == stat.S_IFSOCK:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        os.mknod(path, kind | 0o600, os.makedev(1, 3))
    with pytest.raises(InvalidRequest, match=said):
        import_layer(store, "base", tree)
    nothing_left(store)


def nothing_left(store: LayerStore) -> None:
    assert store.catalog.entries() == ()
    assert not list((store.root / "sha256").iterdir())
    assert not list((store.root / "tmp").iterdir())


def test_names_are_shown_without_their_control_characters(store: LayerStore, tree: Path) -> None:
    os.mknod(os.fsencode(tree) + b"/\x1b[31m\xff", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    with pytest.raises(InvalidRequest) as caught:
        import_layer(store, "base", tree)
    assert "\x1b" not in caught.value.message
    assert r"\x1b[31m\xff" in caught.value.message


def test_owner_outside_a_sandbox_is_refused(store: LayerStore, tree: Path) -> None:
    os.chown(tree / "owned", 65535, 0)
    with pytest.raises(InvalidRequest, match="'owned' belongs to 65535:0"):
        import_layer(store, "base", tree)


def test_mount_inside_the_tree_is_refused(store: LayerStore, tree: Path) -> None:
    """Importing / would otherwise read /proc."""
    (tree / "mounted").mkdir()
    fd = syscalls.new_mount("tmpfs", ())
    syscalls.move_mount(fd, tree / "mounted")
    os.close(fd)
    with pytest.raises(InvalidRequest, match="'mounted' is on another file system"):
        import_layer(store, "base", tree)


@pytest.mark.parametrize("source", ["nothing", "file", "tree/fifo"])
def test_source_that_is_none_is_refused(store: LayerStore, tree: Path, data: Path, source: str) -> None:
    (data / "file").write_text("not a tar")
    with pytest.raises(InvalidRequest) as caught:
        import_layer(store, "base", data / source)
    assert caught.value.field == "source"
    nothing_left(store)


def test_failing_tar_leaves_nothing(store: LayerStore, data: Path) -> None:
    archive = data / "bad.tar"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo("good"))
        tar.addfile(tarfile.TarInfo("../bad"))
    with pytest.raises(InvalidRequest, match=r"'\.\./bad'"):
        import_layer(store, "base", archive)
    nothing_left(store)


def test_store_that_is_full_is_named_and_left_clean(tree: Path, data: Path) -> None:
    """A tree of 40 MiB onto a disk of 48 MiB that keeps 64 MiB free for itself; then one whose need is found too late."""
    image, root = data / "host.img", data / "host"
    with image.open("wb") as file:
        file.truncate(48 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    root.mkdir()
    with loops.attached(image) as device:
        fd = syscalls.new_mount("ext4", (("source", device),))
    syscalls.move_mount(fd, root)
    os.close(fd)
    store = LayerStore(root / "layers")
    (tree / "big").write_bytes(os.urandom(40 * MIB))
    with pytest.raises(NodeStorageFull) as caught:
        import_layer(store, "base", tree)
    assert caught.value.hint
    nothing_left(store)
    with store.temporary() as work:
        with (root / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, 20 * MIB)
        with pytest.raises(NodeStorageFull):
            erofs.convert(tree, work / "layer", 0, stall=2)
        assert not (work / "layer").exists()


def test_a_converter_that_stands_still_is_ended(tree: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = data / "bin"
    programs.mkdir()
    (programs / "mkfs.erofs").write_text("#!/bin/sh\necho it begins >&2\nexec sleep 1000\n")
    (programs / "mkfs.erofs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with pytest.raises(CreateFailed, match="it begins"):
        erofs.convert(tree, data / "layer", 0, stall=0.5)
    assert not (data / "layer").exists()


FAKE = """#!/bin/sh
# Stands in for mmdebstrap: the target is the first word that is a path.
for word; do case $word in /*) target=$word; break;; esac; done
echo "I: making it" >&2
mkdir -p "$target/dev" "$target/etc"
mknod "$target/dev/null" c 1 3
echo made >"$target/etc/issue"
echo x >>"{log}"
exit {code}
"""


def fake_mmdebstrap(monkeypatch: pytest.MonkeyPatch, data: Path, code: int = 0) -> Path:
    programs, log = data / "programs", data / "log"
    programs.mkdir(exist_ok=True)
    (programs / "mmdebstrap").write_text(FAKE.format(log=log, code=code))
    (programs / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return log


def test_bootstrap_is_made_once_and_then_cached(store: LayerStore, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, lines = fake_mmdebstrap(monkeypatch, data), list[str]()
    layer = bootstrap.bootstrap(store, "debian-12", cache=data / "cache", progress=lines.append)
    assert "I: making it" in lines
    again = bootstrap.bootstrap(LayerStore(data / "other"), "debian-12", cache=data / "cache")
    assert again.digest == layer.digest
    assert log.read_text() == "x\n"
    bootstrap.bootstrap(store, "debian-12", packages=("python3",), cache=data / "cache")
    assert log.read_text() == "x\nx\n", "another list of packages is another system"


def test_damaged_cache_is_made_again(store: LayerStore, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_mmdebstrap(monkeypatch, data)
    layer = bootstrap.bootstrap(store, "debian-12", cache=data / "cache")
    cached = next((data / "cache").iterdir())
    os.truncate(cached / "data", 100)
    assert bootstrap.bootstrap(store, "debian-12", cache=data / "cache").digest == layer.digest
    assert log.read_text() == "x\nx\n"


def test_failing_bootstrap_tells_last_words_and_leaves_nothing(
    store: LayerStore, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_mmdebstrap(monkeypatch, data, code=25)
    with pytest.raises(CreateFailed, match="I: making it"):
        bootstrap.bootstrap(store, "debian-12", cache=data / "cache")
    assert not list((data / "cache").iterdir())
    nothing_left(store)


def test_absent_programs_are_named(store: LayerStore, tree: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    erofs._help.cache_clear()
    monkeypatch.setenv("PATH", str(data))
    with pytest.raises(FeatureMissing, match=r"mkfs\.erofs is not installed") as caught:
        import_layer(store, "base", tree)
    assert "erofs-utils" in caught.value.hint
    with pytest.raises(FeatureMissing, match="mmdebstrap"):
        bootstrap.bootstrap(store, "debian-12", cache=data / "cache")
