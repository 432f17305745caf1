"""The tree of an imported image equals what umoci unpacks, an independent reader of the same specification."""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.errors import FeatureMissing
from barchan.layers.sources import import_environment
from barchan.layers.store import LayerStore
from tests import trees
from tests.images import EPOCH, Member, file, folder, hardlink, symlink, tar
from tests.unpacked import compared, overlay, place

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
LONG = "n" * 254


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    with place() as path:
        yield path


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
    "whiteout of a name that a hard link copied": [[hardlink("n", "d/c"), file("d/.wh.c"), file(".wh.a")]],
    "opaque above a name that a hard link copied": [[hardlink("n", "a"), file("d/.wh..wh..opq")]],
    "whiteout of a directory of such a name": [[hardlink("n", "a"), file(".wh.d")]],
    "whiteout of such a name's directory, and a new one": [[hardlink("n", "a"), file(".wh.d"), file("d/x", b"x")]],
    "such a name comes by itself too": [[hardlink("n", "a"), file("d/c", b"c"), file("d/.wh..wh..opq")]],
    "hard link to a name whose others are gone later": [[hardlink("d/sub/n", "a"), file("d/.wh..wh..opq")]],
    "hard link to what a later hard link copied": [[hardlink("n", "a"), hardlink("m", "d/c"), file("d/.wh.c")]],
    "whiteout below, then of the directory": [[file("d/.wh.one"), file(".wh.d")]],
    "whiteout far below, then of the directory": [[file("d/sub/.wh.deep"), file(".wh.d")]],
    "opaque, then whiteout of the directory": [[file("d/.wh..wh..opq"), file(".wh.d")]],
    "opaque below, then opaque": [[file("d/sub/.wh..wh..opq"), file("d/.wh..wh..opq")]],
    "whiteout below, then opaque": [[file("d/sub/.wh.deep"), file("d/.wh..wh..opq")]],
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
