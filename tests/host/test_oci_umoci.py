"""The tree of an imported image equals what umoci unpacks, an independent reader of the same specification."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from barchan.config import Layout as DataLayout
from barchan.errors import FeatureMissing, InvalidRequest
from barchan.kernel import probe, syscalls
from barchan.layers.mount import LayerMounts
from barchan.layers.sources import import_environment
from barchan.layers.stack import compose
from barchan.layers.store import LayerStore
from barchan.spec import EnvironmentRef
from tests import server, trees
from tests.images import EPOCH, Layout, Member, file, folder, hardlink, symlink, tar

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
LONG = "n" * 254


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("importing needs root")
    if shutil.which("umoci") is None:
        pytest.skip("umoci is not installed")
    disks = server.disks()
    if not disks:
        pytest.skip("no file system here can hold images that are mounted from their file")
    path = Path(tempfile.mkdtemp(prefix="barchan-umoci-", dir=disks[0]))
    try:
        if probe.examine(DataLayout(path / "probe")).kernel != "full":
            pytest.skip("overlayfs takes no layers by descriptor here")
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def overlay(work: Path, store: LayerStore, name: str) -> Iterator[Path]:
    """The environment as a sandbox sees it, mounted read-only where nobody else sees it."""
    layers = LayerMounts(work / "mnt", store)
    layers.prepare()
    (work / "empty").mkdir()
    with ExitStack() as stack:
        stack.callback(layers.unmount_all)
        fds = [syscalls.open_tree(work / "empty", clone=True)]
        fds = [*(layers.acquire(layer) for layer in compose(EnvironmentRef(base=name), store.resolve).layers), *fds]
        for fd in fds:
            stack.callback(os.close, fd)
        root = syscalls.new_mount("overlay", [("lowerdir+", fd) for fd in fds])
        stack.callback(os.close, root)
        yield Path(f"/proc/self/fd/{root}")


class Refused(Exception):
    """By umoci."""


def imported(data: Path, layers: Sequence[bytes]) -> None:
    with tempfile.TemporaryDirectory(dir=data) as name:
        Layout(Path(name) / "image").add("test", layers)
        import_environment(LayerStore(Path(name) / "layers"), "image", Path(name) / "image")


def compared(data: Path, layers: Sequence[bytes], way: str = "gzip") -> list[str]:
    """Where the two trees differ."""
    with tempfile.TemporaryDirectory(dir=data) as name:
        work = Path(name)
        layout = Layout(work / "image")
        layout.add("test", layers, way=way)
        umoci = ["umoci", "raw", "unpack", "--image", f"{work}/image:test", str(work / "theirs")]
        done = subprocess.run(umoci, capture_output=True, check=False)
        if done.returncode:
            raise Refused(done.stderr.decode())
        store = LayerStore(work / "layers")
        import_environment(store, "image", work / "image")
        with overlay(work, store, "image") as ours:
            mine = trees.describe(ours, EPOCH + 86400 * 365)
        return trees.differences(mine, trees.describe(work / "theirs", EPOCH + 86400 * 365))


BASE = [
    folder("./", 0o751),
    folder("d", 0o750, uid=3, gid=4, mtime=EPOCH - 5, xattrs={"user.note": b"kept"}),
    file("d/one", b"1", mtime=EPOCH - 9),
    file("d/two", b"22"),
    folder("d/sub"),
    file("d/sub/deep", b"deep"),
    folder("usr"),
    folder("usr/lib", 0o700),
    file("usr/lib/lib.so", b"so"),
    symlink("lib", "usr/lib"),
    symlink("absolute", "/usr"),
    symlink("up", "../../../../usr"),
    symlink("dangling", "made/later"),
    symlink("chain", "absolute/lib"),
    file("a", b"linked", mode=0o4755, uid=7, xattrs={"security.capability": CAPABILITY}),
    hardlink("b", "a"),
    hardlink("d/c", "./a"),
    file("plain", b"plain"),
]
CASES: dict[str, list[list[Member]]] = {
    "base": [],
    "whiteouts": [[file("d/.wh.one"), file(".wh.usr"), file(".wh.never-there")]],
    "whiteout of a link keeps its target": [[file(".wh.lib")]],
    "opaque": [[folder("d", 0o700), file("d/.wh..wh..opq"), file("d/new", b"n")]],
    "opaque after its files": [[folder("d"), file("d/new", b"n"), file("d/.wh..wh..opq")]],
    "opaque without an entry of its directory": [[file("d/.wh..wh..opq"), file("d/new", b"n")]],
    "opaque of nothing": [[file("nothing/.wh..wh..opq")]],
    "whiteouts below a file": [[file("plain/.wh..wh..opq"), file("plain/.wh.x"), file("n"), file("n/.wh..wh..opq")]],
    "opaque root": [[file(".wh..wh..opq"), file("new", b"n")]],
    "opaque and a whiteout in it": [[folder("d"), file("d/.wh.one"), file("d/.wh..wh..opq")]],
    "opaque above what is implied": [[file("d/sub/x", b"x"), file("d/.wh..wh..opq")]],
    "whiteout in a new directory": [[folder("fresh"), file("fresh/.wh.x"), file("fresh/y", b"y")]],
    "whiteout, then again in the same layer": [[file(".wh.d"), folder("d"), file("d/new", b"n")]],
    "again, then whiteout in the same layer": [[folder("d"), file("d/new", b"n"), file(".wh.d")]],
    "whiteout, then implied": [[file(".wh.d"), file("d/new", b"n")]],
    "whiteout of a file that the layer brings": [[file("plain", b"new"), file(".wh.plain")]],
    "whiteout below one": [[folder("d"), file("d/.wh.one"), file(".wh.d")]],
    "again in a later layer": [[file(".wh.d")], [folder("d", 0o711), file("d/new", b"n")]],
    "again and gone again": [[file(".wh.d")], [folder("d"), file("d/new", b"n")], [file("d/.wh.new"), file(".wh.a")]],
    "directory becomes a file": [[file("d", b"file")]],
    "directory becomes a file and a directory": [[file("d", b"file")], [folder("d"), file("d/x", b"x")]],
    "both in one layer": [[file("d", b"file"), folder("d"), file("d/x", b"x")]],
    "new directory becomes a file": [[folder("n"), folder("n/n"), file("n/n/f"), file("n", b"file")]],
    "file becomes a directory": [[folder("plain"), file("plain/x", b"x")]],
    "link becomes a directory": [[folder("lib"), file("lib/x", b"x")]],
    "directory becomes a link": [[symlink("d", "usr"), file("d/through", b"t")]],
    "file becomes a link": [[symlink("plain", "a")]],
    "link becomes a file": [[file("lib", b"file")]],
    "through links of the layer below": [
        [
            file("lib/new.so", b"new"),
            file("absolute/x", b"x"),
            file("up/y", b"y"),
            file("chain/z", b"z"),
            file("dangling/d", b"d"),
        ]
    ],
    "whiteouts through links": [[file("lib/.wh.lib.so"), file("up/lib/.wh..wh..opq")]],
    "through a link, then in its place": [[file("lib/new", b"n"), folder("lib"), file("lib/x", b"x")]],
    "implied parents": [[file("d/sub/new", b"n"), file("not/there/yet", b"n")]],
    "hard link to a file of the layer": [[file("n", b"n", mode=0o600), hardlink("m", "/n"), hardlink("d/m", "n")]],
    "hard link to a file below": [[hardlink("new", "plain")]],
    "hard link to one of several names below": [[hardlink("d/sub/e", "b")]],
    "hard link to a name that is hidden": [[file("d/.wh.c"), file("a", b"other"), hardlink("e", "b")]],
    "hard link in place of another name": [[hardlink("b", "a")], [hardlink("d", "a")]],
    "hard link through a link": [[hardlink("x", "lib/lib.so"), hardlink("lib/y", "absolute/lib/lib.so")]],
    "hard link to a link": [[symlink("s", "nowhere"), hardlink("t", "s"), hardlink("u", "lib")]],
    "name of a group is replaced": [[file("a", b"alone")], [file("b", b"alone too")]],
    "last of a name wins": [
        [file("x", b"1"), file("x", b"22", mode=0o600), file("plain", b"p1"), file("plain", b"p2")]
    ],
    "odd names": [
        [
            file("new\nline", b"n"),
            file("\udcff\udcfe", b"u"),
            file(LONG, b"l"),
            file("./dot/./x//y", b"d"),
            folder("slash/"),
            file("/rooted/z", b"z"),
            file("é", b"e"),
            file(" ", b"s"),
            file("*?[", b"g"),
        ]
    ],
    "modes and owners": [
        [
            file("su", b"x", mode=0o4711, uid=0, gid=65534),
            file("sg", b"x", mode=0o2755, gid=9),
            folder("t", 0o1777),
            folder("sgd", 0o2775, gid=50),
            file("fifo", type=tarfile.FIFOTYPE, mode=0o622),
            symlink("ls", "x", uid=5, gid=6, mtime=EPOCH - 100),
            file("none", b"x", mode=0),
        ]
    ],
    "attributes": [
        [
            file("cap", b"x", xattrs={"security.capability": CAPABILITY, "user.bin": b"\0\xff=\n"}),
            folder("dx", xattrs={"user.d": b"d", "user.empty": b""}),
            file("selinux", b"x", xattrs={"security.selinux": b"u:r:t:s0", "user.kept": b"1"}),
        ],
        [folder("d"), file("dx/x", b"x")],
    ],
    "times": [[file("t", b"t", mtime=EPOCH - 1234.5), file("old", b"o", mtime=0), folder("d", mtime=1)]],
    "empty layer": [[], [file("x", b"x")], []],
    "the same layer twice": [[file("x", b"1")], [file("x", b"2"), file(".wh.d")], [file("x", b"1")]],
    "root": [[folder("./", 0o711, mtime=EPOCH - 77)], [file("x", b"x")]],
}


@pytest.mark.parametrize("case", CASES)
def test_tree_equals(data: Path, case: str) -> None:
    """CASES 12: layers of images."""
    assert not compared(data, [tar(BASE), *(tar(members) for members in CASES[case])])


@pytest.mark.parametrize("way", ["", "gzip"])
@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_formats_of_tar(data: Path, form: int, way: str) -> None:
    long = [file("p/" * 40 + "x", b"x"), symlink("s", "t" * 90)]
    more = [] if form == tarfile.USTAR_FORMAT else [file("q" * 200, b"q"), symlink("r", "t" * 300)]
    assert not compared(data, [tar([*long, *more], form)], way)


def test_longest_name_is_kept_or_refused(data: Path) -> None:
    """mkfs.erofs 1.5 cuts names of 255 bytes: then nothing is made, rather than another tree."""
    try:
        assert not compared(data, [tar([file("d/" + "n" * 255, b"1"), file("d/" + "n" * 254, b"2")])])
    except FeatureMissing as error:
        assert "n" * 255 in error.message
        assert error.phase == "convert"


FOLDERS = st.lists(st.sampled_from("abc"), max_size=2)
LEAVES = st.sampled_from("xyxyxyabc")
PATHS = st.tuples(FOLDERS, LEAVES).map(lambda path: "/".join((*path[0], path[1])))
TARGETS = st.one_of(PATHS, PATHS.map(lambda path: "/" + path), PATHS.map(lambda path: "../" + path))
START = [
    *(folder(name) for name in ("a", "b", "a/b")),
    file("a/x", b"ax"),
    hardlink("a/y", "a/x"),
    hardlink("b/x", "a/x"),
    file("x", b"x"),
    file("a/b/x", b"abx"),
    symlink("c", "a/b"),
    symlink("b/c", "../a"),
]


@st.composite
def members(draw: st.DrawFn) -> Member:
    path, mode = draw(PATHS), draw(st.sampled_from([0o644, 0o755, 0o700]))
    kind = draw(
        st.sampled_from(["file", "file", "folder", "folder", "symlink", "hardlink", "whiteout", "whiteout", "opaque"])
    )
    above, slash, name = path.rpartition("/")
    if kind == "whiteout":
        return file(f"{above}{slash}.wh.{name}")
    if kind == "opaque":
        return file(f"{path}/.wh..wh..opq")
    if kind == "folder":
        return folder(path, mode, uid=draw(st.integers(0, 3)))
    if kind == "symlink":
        return symlink(path, draw(TARGETS))
    if kind == "hardlink":
        return hardlink(path, draw(PATHS))
    return file(path, draw(st.binary(max_size=3)), mode=mode)


HISTORIES = st.lists(st.lists(members(), max_size=7), min_size=1, max_size=4)


@settings(
    max_examples=int(os.environ.get("BARCHAN_UMOCI_EXAMPLES", "12")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(HISTORIES)
def test_random_histories_give_the_same_tree(data: Path, history: list[list[Member]]) -> None:
    """What umoci refuses (a file as a parent, a hard link to nothing) must be refused here too, and the reverse."""
    history = [START, *history]
    while True:
        layers = [tar(layer) for layer in history]
        try:
            found = compared(data, layers)
        except Refused as error:
            with pytest.raises(InvalidRequest) as caught:
                imported(data, layers)
            assert caught.value.phase == "convert", error
            event("a history that is refused, then without its last member")
            history = [*history[:-1], history[-1][:-1]] if history[-1] else history[:-1]
        else:
            event(f"{len(history)} layers equal")
            assert not found, "\n".join(found)
            return


def test_a_difference_is_seen(data: Path) -> None:
    """The control of this module: umoci keeps what lies below; a layer that hides it must differ."""
    with tempfile.TemporaryDirectory(dir=data) as name:
        work = Path(name)
        for root, mode in (("one", 0o755), ("two", 0o750)):
            (work / root).mkdir()
            (work / root / "f").write_text("x")
            (work / root / "f").chmod(mode)
        assert trees.differences(trees.describe(work / "one", EPOCH), trees.describe(work / "two", EPOCH))


def test_a_layer_that_umoci_made(data: Path) -> None:
    """It ends behind the content of its last file: neither padding nor end blocks."""
    with tempfile.TemporaryDirectory(dir=data) as name:
        work = Path(name)
        (work / "FILE").write_text("hello\n")
        layout, image = str(work / "image"), f"{work}/image:1"
        for argv in (
            ("init", "--layout", layout),
            ("new", "--image", image),
            ("insert", "--image", image, str(work / "FILE"), "/hello"),
        ):
            subprocess.run(["umoci", *argv], check=True, capture_output=True)
        store = LayerStore(work / "layers")
        import_environment(store, "image", work / "image")
        with overlay(work, store, "image") as ours:
            assert (ours / "hello").read_text() == "hello\n"
