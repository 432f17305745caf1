"""A tar comes from a stranger: nothing outside the target is touched, and what cannot be honest is refused by name."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import InvalidRequest
from barchan.layers import tarwalk, untar


def member(name: str, content: bytes | None = None, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.uid, info.gid, info.mtime = os.getuid(), os.getgid(), 1_600_000_000
    info.size = len(content or b"")
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content or b""


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=kind, linkname=target)


def unpack(tmp_path: Path, members: Iterable[tuple[tarfile.TarInfo, bytes]], mode: Any = "w") -> Path:
    archive, root = tmp_path / "a.tar", tmp_path / "root"
    with tarfile.open(archive, mode) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    root.mkdir()
    untar.unpack(archive, root)
    return root


def test_tree_is_as_the_tar_says(tmp_path: Path) -> None:
    root = unpack(
        tmp_path,
        [
            member("./", type=tarfile.DIRTYPE, mode=0o755),
            member("d", type=tarfile.DIRTYPE, mode=0o750, mtime=1_500_000_000),
            member("d/f", b"content", mode=0o4755),
            link("d/absolute", "/etc/passwd"),
            link("d/up", "../../../etc"),
            link("d/hard", "./d/f", tarfile.LNKTYPE),
            member("deep/er/file", b""),
            member("fifo", type=tarfile.FIFOTYPE, mode=0o640),
        ],
    )
    assert (root / "d/f").read_bytes() == b"content"
    assert stat.S_IMODE((root / "d/f").stat().st_mode) == 0o4755
    assert (root / "d/f").stat().st_mtime == 1_600_000_000
    assert (root / "d").stat().st_mtime == 1_500_000_000, "written into after its time was set"
    assert stat.S_IMODE((root / "d").stat().st_mode) == 0o750
    assert os.readlink(root / "d/up") == "../../../etc"
    assert (root / "d/hard").samefile(root / "d/f")
    assert stat.S_ISFIFO((root / "fifo").stat().st_mode)


BAD = {
    "absolute": [member("/etc/x", b"")],
    "dots": [member("a/../../x", b"")],
    "through a link": [link("a", "/tmp"), member("a/x", b"")],
    "through a relative link": [member("b", type=tarfile.DIRTYPE), link("a", "b"), member("a/x", b"")],
    "directory over a link": [link("a", "/tmp"), member("a", type=tarfile.DIRTYPE)],
    "hard link outside": [link("a", "../../etc/passwd", tarfile.LNKTYPE)],
    "absolute hard link": [link("a", "/etc/passwd", tarfile.LNKTYPE)],
    "hard link to nothing": [link("a", "nothing", tarfile.LNKTYPE)],
    "hard link through a link": [link("l", "/etc"), link("a", "l/passwd", tarfile.LNKTYPE)],
    "device": [member("a", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "block device": [member("a", type=tarfile.BLKTYPE, devmajor=8, devminor=0)],
    "whiteout": [member("d/.wh.x", b"")],
    "file over a directory": [member("a/b", b""), member("a", b"")],
    "overlay attribute": [member("a", b"", pax_headers={"SCHILY.xattr.trusted.overlay.redirect": "/etc"})],
}


@pytest.mark.parametrize("case", BAD)
def test_dishonest_member_is_refused_by_name(tmp_path: Path, case: str) -> None:
    canary = tmp_path / "x"
    with pytest.raises(InvalidRequest) as caught:
        unpack(tmp_path, BAD[case])
    assert "tar member" in caught.value.message
    assert caught.value.phase == "unpack"
    assert not canary.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "root"]


def test_later_member_replaces_a_link_without_following_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("safe")
    root = unpack(tmp_path, [link("a", str(outside)), member("a", b"new")])
    assert outside.read_text() == "safe"
    assert (root / "a").read_text() == "new"
    assert not (root / "a").is_symlink()


def test_attributes_are_kept(tmp_path: Path) -> None:
    root = unpack(tmp_path, [member("a", b"x", pax_headers={"SCHILY.xattr.user.note": "hello"})], "w:")
    assert os.getxattr(root / "a", "user.note") == b"hello"


@pytest.mark.parametrize("keep", [100, 700, 1100, 2000])
def test_damaged_tar_is_refused(tmp_path: Path, keep: int) -> None:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        for i in range(100):
            info, content = member(f"f{i}", os.urandom(64))
            tar.addfile(info, io.BytesIO(content))
    archive.write_bytes(archive.read_bytes()[:keep])
    (tmp_path / "root").mkdir()
    with pytest.raises(InvalidRequest, match="not a readable tar"):
        untar.unpack(archive, tmp_path / "root")


def test_number_of_members_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarwalk, "MOST_ENTRIES", 3)
    with pytest.raises(InvalidRequest, match="'f3' is beyond the limit"):
        unpack(tmp_path, [member(f"f{i}", b"") for i in range(4)])


def test_directories_that_the_tar_only_implies_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        root = unpack(tmp_path, [member("deep/er/file", b"")])
    finally:
        os.umask(old)
    assert [stat.S_IMODE((root / name).stat().st_mode) for name in ("deep", "deep/er")] == [0o755, 0o755]


@pytest.mark.parametrize("content", [b"", b"x", b"x" * 511, b"x" * 512, b"x" * 513])
def test_an_archive_may_end_behind_its_last_content(tmp_path: Path, content: bytes) -> None:
    """Without end blocks, or what fills up the last block. Any other end is a cut."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for info, data in (member("first", b"1"), member("last", content)):
            tar.addfile(info, io.BytesIO(data))
    end = 3 * tarfile.BLOCKSIZE + len(content)
    filled = end + -len(content) % tarfile.BLOCKSIZE
    for size in {end, filled, filled + tarfile.BLOCKSIZE}:
        (tmp_path / "a.tar").write_bytes(whole.getvalue()[:size])
        root = tmp_path / f"root-{size}"
        root.mkdir()
        untar.unpack(tmp_path / "a.tar", root)
        assert (root / "last").read_bytes() == content
    for size in {end - 1, end + 1} - {filled, filled + 1}:
        (tmp_path / "a.tar").write_bytes(whole.getvalue()[:size])
        root = tmp_path / f"cut-{size}"
        root.mkdir()
        with pytest.raises(InvalidRequest):
            untar.unpack(tmp_path / "a.tar", root)
