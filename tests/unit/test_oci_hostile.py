"""A layer comes from a stranger: nothing outside the tree is touched, and what cannot be honest is refused by name."""

from __future__ import annotations

import os
import stat
import struct
import tarfile
from pathlib import Path

import pytest

from barchan.errors import InvalidRequest, NodeStorageFull
from barchan.layers import changeset, tarwalk
from barchan.layers.lower import OPAQUE, Lower
from tests.images import EPOCH, Member, file, folder, hardlink, symlink, tar

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners and overlay attributes need root")


def apply(tmp_path: Path, archive: bytes, *below: Path) -> Path:
    """The tree of one layer on top of directories, top first."""
    (tmp_path / "layer.tar").write_bytes(archive)
    root = tmp_path / "root"
    root.mkdir()
    fds = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in below]
    try:
        changeset.apply(tmp_path / "layer.tar", root, Lower(lambda: fds), "the layer")
    finally:
        for fd in fds:
            os.close(fd)
    return root


def lower_tree(tmp_path: Path, victim: Path) -> Path:
    """A lower layer whose links lead out of it, for whoever follows them."""
    lower = tmp_path / "lower"
    lower.mkdir()
    (lower / "out").symlink_to(victim)
    (lower / "up").symlink_to(os.path.relpath(victim, lower))
    (lower / "loop").symlink_to("loop")
    (lower / "round").symlink_to("about")
    (lower / "about").symlink_to("round")
    return lower


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of the host that no layer may change or read."""
    path = tmp_path / "victim"
    path.mkdir()
    (path / "secret").write_text("secret")
    (path / "kept").mkdir()
    return path


def state(path: Path) -> list[tuple[str, int, int, int]]:
    return sorted(
        (str(p), p.lstat().st_mode, p.lstat().st_mtime_ns, p.lstat().st_nlink) for p in (path, *path.rglob("*"))
    )


REFUSED: dict[str, tuple[list[Member], str]] = {
    "dots": ([file("a/../../x")], "'..'"),
    "dots alone": ([folder("..")], "'..'"),
    "dots at the end": ([folder("a/..")], "'..'"),
    "whiteout of dots": ([file("a/.wh...")], "no whiteout"),
    "whiteout of a dot": ([file("a/.wh..")], "no whiteout"),
    "whiteout of nothing": ([file("a/.wh.")], "no whiteout"),
    "whiteout of a whiteout": ([file("a/.wh..wh.aufs")], "no whiteout"),
    "whiteout with dots": ([file("../.wh.victim")], "'..'"),
    "below a whiteout": ([file(".wh.a/b")], "below a whiteout"),
    "root becomes a link": ([symlink(".", "/etc")], "the root"),
    "root becomes a file": ([file("/", b"x")], "the root"),
    "hard link with dots": ([hardlink("a", "../victim/secret")], "'..'"),
    "hard link to nothing": ([hardlink("a", "nothing")], "no file"),
    "hard link to itself": ([hardlink("a", "a")], "no file"),
    "hard link to what it replaces": ([folder("d"), file("d/x"), hardlink("d", "d/x")], "no file"),
    "hard link to a directory": ([folder("d"), hardlink("a", "d")], "no file"),
    "hard link to the root": ([hardlink("a", "/")], "no file"),
    "hard link to a whiteout": ([hardlink("a", ".wh.b")], "no file"),
    "below a file": ([file("f"), file("f/x")], "not a directory"),
    "through a loop": ([symlink("l", "l"), file("l/x")], "links"),
    "through a long chain": ([*(symlink(f"l{i}", f"l{i + 1}") for i in range(300)), file("l0/x")], "links"),
    "character device": ([file("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)], "device"),
    "block device": ([file("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=0)], "device"),
    "whiteout of overlayfs": ([file("w", type=tarfile.CHRTYPE, devmajor=0, devminor=0)], "device"),
    "unknown type": ([file("v", type=b"V")], "unknown type"),
    "opaque by attribute": ([folder("d", xattrs={OPAQUE: b"y"})], OPAQUE),
    "redirect": ([folder("d", xattrs={"trusted.overlay.redirect": b"/etc"})], "trusted.overlay.redirect"),
    "metacopy": ([file("f", xattrs={"trusted.overlay.metacopy": b"x"})], "trusted.overlay.metacopy"),
    "trusted": ([file("f", xattrs={"trusted.other": b"x"})], "trusted.other"),
    "ima": ([file("f", xattrs={"security.ima": b"x"})], "security.ima"),
    "attribute of a link": ([symlink("l", "x", xattrs={"user.x": b"x"})], "cannot be made"),
    "broken capability": ([file("f", xattrs={"security.capability": b"x"})], "cannot be made"),
    "owner too high": ([file("f", uid=65535)], "65535"),
    "owner far too high": ([file("f", gid=1 << 40)], "belongs to"),
    "owner below zero": ([file("f", uid=-1)], "belongs to"),
    "name too long": ([file("n" * 256)], "cannot be made"),
    "path too long": ([file("/".join(["n" * 200] * 30))], "no file can have"),
    "too deep": ([file("d/" * 400 + "f")], "400 directories deep"),
    "too deep through links": (
        [folder("d/" * 300), symlink("l", "d/" * 300), file("l/" + "e/" * 200 + "f")],
        "400 directories deep",
    ),
    "time that is none": ([file("f", pax_headers={"mtime": "inf"})], "modification time"),
    "time that never comes": ([file("f", pax_headers={"mtime": "9" * 30})], "modification time"),
    "not a time": ([file("f", pax_headers={"mtime": "nan"})], "modification time"),
    "name with NUL": ([file("f", pax_headers={"path": "a\0b"})], "no file can have"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_malicious_member_is_refused_by_name(tmp_path: Path, victim: Path, case: str) -> None:
    """CASES 12: layers of images."""
    members, said = REFUSED[case]
    before = state(victim)
    archive = tar([file("first", b"1"), *members], tarfile.PAX_FORMAT)
    with pytest.raises(InvalidRequest) as caught:
        apply(tmp_path, archive, lower_tree(tmp_path, victim))
    assert said in caught.value.message
    assert caught.value.message.startswith("tar member ")
    assert (caught.value.phase, caught.value.field) == ("convert", "source")
    assert state(victim) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer.tar", "lower", "root", "victim"]


@pytest.mark.parametrize("way", ["out", "up", "new", "relative"])
@pytest.mark.parametrize("brought", [True, False], ids=["own link", "link below"])
def test_links_out_of_the_image_lead_back_into_it(tmp_path: Path, victim: Path, way: str, brought: bool) -> None:
    """Whatever a link says, its target is meant inside the image; the host's directory of that name is not touched."""
    lower, before = lower_tree(tmp_path, victim), state(victim)
    targets = {"out": victim, "up": os.path.relpath(victim, lower), "new": victim / "new", "relative": "../" * 40 + "x"}
    link = [symlink(way, str(targets[way]))]
    if not brought:
        (lower / way).unlink(missing_ok=True)
        (lower / way).symlink_to(targets[way])
    members = [
        file(f"{way}/f", b"mine"),
        file(f"{way}/.wh.secret"),
        file(f"{way}/.wh..wh..opq"),
        folder(f"{way}/kept", 0o700),
    ]
    root = apply(tmp_path, tar([*(link if brought else []), *members]), lower)
    assert state(victim) == before
    written = [path for path in root.rglob("f")]
    assert [path.read_text() for path in written] == ["mine"]
    inside = written[0].parent.relative_to(root)
    assert str(inside) == (os.path.normpath(f"/{targets[way]}").lstrip("/") if way in ("out", "new") else str(inside))
    assert root in written[0].resolve().parents


@pytest.mark.parametrize("link", ["loop", "round"])
def test_loops_of_links_below_are_refused(tmp_path: Path, victim: Path, link: str) -> None:
    with pytest.raises(InvalidRequest, match="more than 255 links"):
        apply(tmp_path, tar([file(f"{link}/x")]), lower_tree(tmp_path, victim))


def test_hard_link_through_a_link_out_finds_nothing(tmp_path: Path, victim: Path) -> None:
    with pytest.raises(InvalidRequest, match="no file of the image"):
        apply(tmp_path, tar([hardlink("stolen", "out/secret")]), lower_tree(tmp_path, victim))


def test_lookup_below_follows_no_link_of_the_host(tmp_path: Path, victim: Path) -> None:
    """The layer makes `out` a directory; the link of the same name below it leads to the host's."""
    lower = lower_tree(tmp_path, victim)
    with pytest.raises(InvalidRequest, match="no file of the image"):
        apply(tmp_path, tar([folder("out"), hardlink("stolen", "out/secret")]), lower)


def test_member_replaces_a_link_and_does_not_write_through_it(tmp_path: Path, victim: Path) -> None:
    before = state(victim)
    link = symlink("a", str(victim / "secret"))
    root = apply(tmp_path, tar([link, file("a", b"new"), symlink("d", str(victim)), folder("d"), file("d/x")]))
    assert state(victim) == before
    assert (root / "a").read_text() == "new"
    assert os.getxattr(root / "d", OPAQUE) == b"y", "it took the place of something"


def test_whiteouts_become_what_overlayfs_knows(tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    (lower / "d").mkdir(parents=True)
    (lower / "d/x").touch()
    root = apply(tmp_path, tar([file("d/.wh.x"), file("d/.wh.absent"), folder("o"), file("o/.wh..wh..opq")]), lower)
    at = (root / "d/x").lstat()
    assert (stat.S_ISCHR(at.st_mode), at.st_rdev) == (True, 0)
    assert not (root / "d/absent").exists(), "there is nothing to hide"
    assert os.getxattr(root / "o", OPAQUE) == b"y"


def test_conversion_is_right_only_where_the_answers_are_the_same(tmp_path: Path) -> None:
    """A link on the way is a fact of the stack; one without it gives another tree."""
    one, two = tmp_path / "one", tmp_path / "two"
    for tree in (one, two):
        (tree / "usr").mkdir(parents=True)
        os.utime(tree / "usr", (EPOCH, EPOCH))
        os.utime(tree, (EPOCH, EPOCH))
    (one / "l").symlink_to("usr")
    (tmp_path / "layer.tar").write_bytes(tar([file("l/x")]))
    (tmp_path / "root").mkdir()
    fds = [os.open(path, os.O_RDONLY) for path in (one, two)]
    lower = Lower(lambda: fds[:1])
    changeset.apply(tmp_path / "layer.tar", tmp_path / "root", lower, "it")
    facts = tuple(lower.facts.values())
    assert Lower(lambda: fds[:1]).gives(facts)
    assert not Lower(lambda: fds[1:]).gives(facts)
    for fd in fds:
        os.close(fd)


def header(**fields: bytes) -> bytes:
    """A ustar header of a file, with any bytes in any field."""
    values = {"name": b"f", "mode": b"0000644\0", "uid": b"0000000\0", "gid": b"0000000\0", "size": b"00000000000\0"}
    values |= {"mtime": b"00000000000\0", "type": b"0", **fields}
    order = (("name", 100), ("mode", 8), ("uid", 8), ("gid", 8), ("size", 12), ("mtime", 12))
    head = b"".join(values[key].ljust(width, b"\0") for key, width in order) + b" " * 8 + values["type"]
    block = bytearray(head.ljust(257, b"\0") + b"ustar\x0000").ljust(512, b"\0")
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


NINE_GIB = b"\x80" + struct.pack(">Q", 9 << 30).rjust(11, b"\0")
BASE_256_MINUS = b"\xff" * 12
DAMAGED: dict[str, bytes] = {
    "cut in a header": tar([file("a"), file("b")])[:700],
    "cut in the content": tar([file("a", b"x" * 5000)])[:2000],
    "damaged header in the middle": tar([file("a"), file("b"), file("c")]).replace(b"b\0\0", b"X\0\0", 1),
    "not a tar": b"hello" * 500,
    "nine GiB that are not there": header(size=NINE_GIB) + bytes(1024),
    "negative size": header(size=BASE_256_MINUS) + header() + bytes(1024),
    "long name of 4 GiB": header(type=b"L", size=b"\x80" + struct.pack(">Q", 4 << 30).rjust(11, b"\0")) + bytes(1024),
    "attributes of 8 GiB": header(type=b"x", size=b"\x80" + struct.pack(">Q", 8 << 30).rjust(11, b"\0")) + bytes(1024),
    "negative attributes": header(type=b"x", size=BASE_256_MINUS) + bytes(1024),
    "headers without end": header(type=b"x") * 3000 + bytes(1024),
    "negative size in attributes": tar([file("f", b"x", pax_headers={"size": "-1000"})]),
    "record of size zero": header(type=b"x", size=b"00000001000\0")
    + b"0 a=b\n".ljust(512, b"\0")
    + header()
    + bytes(1024),
    "sparse map backwards": tar(
        [file("f", b"x" * 512, pax_headers={"GNU.sparse.size": "100", "GNU.sparse.map": "90,5,10,5"})]
    ),
    "sparse map beyond the end": tar(
        [file("f", b"x" * 512, pax_headers={"GNU.sparse.size": "100", "GNU.sparse.map": "10,500"})]
    ),
    "sparse map of words": tar([file("f", b"x", pax_headers={"GNU.sparse.size": "9", "GNU.sparse.map": "a,b"})]),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.timeout(20)
def test_damaged_tar_is_refused_in_bounded_time_and_memory(tmp_path: Path, case: str) -> None:
    with pytest.raises((InvalidRequest, NodeStorageFull)) as caught:
        apply(tmp_path, DAMAGED[case])
    assert caught.value.phase == "convert"
    assert not [path for path in (tmp_path / "root").rglob("*") if path.lstat().st_size > 1 << 20]


def test_header_of_any_size_is_not_read_into_memory(tmp_path: Path) -> None:
    """Here the bytes are really there, as a hole."""
    size = 1 << 30
    (tmp_path / "layer.tar").write_bytes(header(type=b"x", size=b"\x80" + struct.pack(">Q", size).rjust(11, b"\0")))
    os.truncate(tmp_path / "layer.tar", size + 1536)
    (tmp_path / "root").mkdir()
    with pytest.raises(InvalidRequest, match=f"a header of {size} bytes"):
        changeset.apply(tmp_path / "layer.tar", tmp_path / "root", Lower(lambda: ()), "the layer")


def test_sparse_files_are_expanded_without_being_stored(tmp_path: Path) -> None:
    size, at = 1 << 30, (1 << 30) - 512
    headers = {"GNU.sparse.size": str(size), "GNU.sparse.map": f"{at},512"}
    root = apply(tmp_path, tar([file("f", b"x" * 512, pax_headers=headers)]))
    found = (root / "f").stat()
    assert found.st_size == size
    assert found.st_blocks * 512 < 1 << 20
    with (root / "f").open("rb") as made:
        assert made.read(4096) == bytes(4096)
        made.seek(at)
        assert made.read() == b"x" * 512


def test_sparse_bomb_is_refused_before_it_is_made(tmp_path: Path) -> None:
    headers = {"GNU.sparse.size": str(1 << 60), "GNU.sparse.map": "0,512"}
    with pytest.raises(NodeStorageFull, match="'f'"):
        apply(tmp_path, tar([file("f", b"x" * 512, pax_headers=headers)]))


def test_number_of_members_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarwalk, "MOST_ENTRIES", 3)
    with pytest.raises(InvalidRequest, match="'f3' is beyond the limit"):
        apply(tmp_path, tar([file(f"f{i}") for i in range(4)]))


def test_directories_that_a_member_implies_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarwalk, "MOST_ENTRIES", 100)
    with pytest.raises(InvalidRequest, match="beyond the limit"):
        apply(tmp_path, tar([file("/".join("d" * 200))]))
