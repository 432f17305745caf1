"""The real guest binary's file operations, as an ordinary root process on the host's own file system."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.wire import guest as wire
from barchan.wire.frames import FrameType, encode, encode_data, encode_eof
from barchan.wire.guest import ALL, KEEP, Cursor, Done, Entry, GuestOutcome, OpKind, blob
from tests.host.guest_client import Guest, Link, Result, exec_parts

PARENTS, APPEND, EXCLUSIVE = 1, 2, 4
TREE, MISSING = 1, 2
NOBODY = b"12345:12345"
ALL_LEVELS = 0xFFFFFFFF


class Files:
    """One call per operation; returns what the guest answered."""

    def __init__(self, guest: Guest, link: Link) -> None:
        self.guest, self.link = guest, link
        self.result = Result()

    def call(self, kind: OpKind, *parts: bytes, user: bytes = b"", data: bytes | None = None) -> Done:
        op = self.guest.next_op()
        self.result = self.link.start(op, kind, *parts, user=user)
        if data is not None:
            self.link.feed(op, data)
        done = self.link.wait(op)
        self.link.forget(op)
        return done

    def error(self, kind: OpKind, *parts: bytes, user: bytes = b"", data: bytes | None = None) -> tuple[int, bytes]:
        done = self.call(kind, *parts, user=user, data=data)
        assert done.outcome == GuestOutcome.FAILED
        return done.code, done.detail

    def fine(self, kind: OpKind, *parts: bytes, user: bytes = b"", data: bytes | None = None) -> bytes:
        done = self.call(kind, *parts, user=user, data=data)
        assert (done.outcome, done.code) == (GuestOutcome.EXITED, 0), (os.strerror(done.code), done.detail)
        return self.result.stdout


@pytest.fixture
def files(guest: Guest) -> Iterator[Files]:
    with guest.dial() as link:
        yield Files(guest, link)


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every user can reach and write. Not below pytest's own: each new session closes that to others again."""
    with tempfile.TemporaryDirectory(prefix="files-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


def at(path: Path | str) -> bytes:
    return blob(os.fsencode(path))


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def reading(path: Path | str, offset: int = 0, length: int = ALL) -> bytes:
    return at(path) + struct.pack("<QQ", offset, length)


def writing(path: Path | str, flags: int = 0, mode: int = KEEP, uid: int = KEEP, gid: int = KEEP) -> bytes:
    return at(path) + u32(flags, mode, uid, gid)


def entries(data: bytes) -> dict[str, Entry]:
    cursor, found = Cursor(data), {}
    while cursor.left:
        entry = wire.read_entry(cursor)
        found[os.fsdecode(entry.path)] = entry
    return found


def items(data: bytes) -> dict[str, tuple[Entry, bytes]]:
    cursor, found = Cursor(data), {}
    while cursor.left:
        entry, content = wire.read_entry(cursor, wire.ITEM_KINDS), b""
        while entry.kind == "f" and (piece := cursor.blob()):
            content += piece
        found[os.fsdecode(entry.path)] = (entry, content)
    return found


def item(
    path: str, kind: str = "f", content: bytes = b"", *, mode: int = 0o644, target: str = "", uid: int = 0
) -> bytes:
    entry = Entry(os.fsencode(path), kind, mode, uid, 0, 1, len(content), 1_000_000_000, os.fsencode(target))
    pieces = (blob(content) if content else b"") + blob(b"") if kind == "f" else b""
    return wire.encode_entry(entry) + pieces


# ---- stat, list, mkdir, rename, remove


def test_stat_of_every_kind(files: Files, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "l").symlink_to("f")
    os.mkfifo(tmp_path / "p")
    for name, follow, kind in (("f", 0, "f"), ("l", 0, "l"), ("l", 1, "f"), ("p", 1, "p"), ("", 0, "d")):
        done = files.call(OpKind.STAT, at(tmp_path / name), bytes([follow]))
        entry, status = wire.read_entry(Cursor(done.detail)), os.stat(tmp_path / name, follow_symlinks=bool(follow))
        assert (entry.kind, entry.path, entry.size, entry.mtime_ns) == (kind, b"", status.st_size, status.st_mtime_ns)
        assert (entry.mode, entry.nlink) == (stat.S_IMODE(status.st_mode), status.st_nlink)
        assert entry.target == (b"f" if kind == "l" else b"")
    assert files.error(OpKind.STAT, at(tmp_path / "none"), b"\0") == (errno.ENOENT, b"stat")
    assert files.error(OpKind.STAT, at(tmp_path / "f" / "x"), b"\0") == (errno.ENOTDIR, b"stat")


def test_list_by_depth(files: Files, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("x")
    (tmp_path / "link").symlink_to("a")
    assert set(entries(files.fine(OpKind.LIST, at(tmp_path), u32(1)))) == {"a", "link"}
    assert set(entries(files.fine(OpKind.LIST, at(tmp_path), u32(2)))) == {"a", "a/b", "link"}
    assert set(entries(files.fine(OpKind.LIST, at(tmp_path), u32(99)))) == {"a", "a/b", "a/b/c", "link"}
    assert set(entries(files.fine(OpKind.LIST, at(tmp_path / "link"), u32(1)))) == {"b"}
    assert files.error(OpKind.LIST, at(tmp_path / "a" / "b" / "c"), u32(1))[0] == errno.ENOTDIR


def test_list_of_many_entries(files: Files, tmp_path: Path) -> None:
    names = {f"{i:05d}-" + "n" * 200 for i in range(8000)}
    for name in names:
        (tmp_path / name).touch()
    assert set(entries(files.fine(OpKind.LIST, at(tmp_path), u32(1)))) == names


def test_mkdir(files: Files, tmp_path: Path) -> None:
    files.fine(OpKind.MKDIR, at(tmp_path / "d"), u32(0, 0o1777))
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o1777
    assert files.error(OpKind.MKDIR, at(tmp_path / "d"), u32(0, 0o755)) == (errno.EEXIST, b"mkdir")
    assert files.error(OpKind.MKDIR, at(tmp_path / "x" / "y"), u32(0, 0o755)) == (errno.ENOENT, b"mkdir")
    files.fine(OpKind.MKDIR, at(f"{tmp_path}/x/y/"), u32(PARENTS, 0o700))
    files.fine(OpKind.MKDIR, at(tmp_path / "x" / "y"), u32(PARENTS, 0o700))
    files.fine(OpKind.MKDIR, at("/"), u32(PARENTS, 0o700))
    assert (tmp_path / "x" / "y").is_dir()


def test_rename(files: Files, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    files.fine(OpKind.RENAME, at(tmp_path / "a"), at(tmp_path / "b"))
    assert (tmp_path / "b").read_text() == "1" and not (tmp_path / "a").exists()
    assert files.error(OpKind.RENAME, at(tmp_path / "a"), at(tmp_path / "b")) == (errno.ENOENT, b"rename")


def test_remove(files: Files, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = tmp_path / "tree"
    for i in range(300):
        (tree / f"d{i}" / "e").mkdir(parents=True)
        (tree / f"d{i}" / "f").touch()
    (tree / "link").symlink_to(outside)
    assert files.error(OpKind.REMOVE, at(tree), u32(0)) == (errno.ENOTEMPTY, b"remove")
    files.fine(OpKind.REMOVE, at(tree), u32(TREE))
    assert not tree.exists() and (outside / "kept").exists()
    assert files.error(OpKind.REMOVE, at(tree), u32(TREE)) == (errno.ENOENT, b"remove")
    files.fine(OpKind.REMOVE, at(tree), u32(TREE | MISSING))
    files.fine(OpKind.REMOVE, at(outside / "kept"), u32(0))
    files.fine(OpKind.REMOVE, at(outside), u32(0))
    assert files.error(OpKind.REMOVE, at("/"), u32(TREE))[0] == errno.EBUSY


def test_remove_of_a_tree_deeper_than_any_path(files: Files, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 20, dir_fd=fd)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    files.fine(OpKind.REMOVE, at(tmp_path / ("d" * 20)), u32(TREE))
    assert list(tmp_path.iterdir()) == []


# ---- read and write


@pytest.mark.parametrize("size", [0, 1, 20_000, 30_000_000])
def test_write_and_read_back(files: Files, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    files.fine(OpKind.WRITE, writing(tmp_path / "f"), data=data)
    assert hashlib.sha256((tmp_path / "f").read_bytes()).digest() == hashlib.sha256(data).digest()
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o644
    assert files.fine(OpKind.READ, reading(tmp_path / "f")) == data
    assert files.fine(OpKind.READ, reading(tmp_path / "f", 5, 7)) == data[5:12]
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_an_overwritten_file_keeps_mode_and_owner(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    os.chown(path, 1234, 4321)
    path.chmod(0o4750)
    files.fine(OpKind.WRITE, writing(path), data=b"new")
    status = path.stat()
    assert (path.read_bytes(), stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (
        b"new",
        0o4750,
        1234,
        4321,
    )
    files.fine(OpKind.WRITE, writing(path, mode=0o600, uid=7, gid=8), data=b"mine")
    status = path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o600, 7, 8)


def test_write_through_links(files: Files, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("old")
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to(tmp_path / "d" / "f")
    (tmp_path / "dangling").symlink_to("d/made")
    files.fine(OpKind.WRITE, writing(tmp_path / "one"), data=b"new")
    files.fine(OpKind.WRITE, writing(tmp_path / "dangling"), data=b"made")
    assert (tmp_path / "one").is_symlink() and (tmp_path / "d" / "f").read_text() == "new"
    assert (tmp_path / "d" / "made").read_text() == "made"
    (tmp_path / "loop").symlink_to("loop")
    assert files.error(OpKind.WRITE, writing(tmp_path / "loop"), data=b"")[0] == errno.ELOOP
    assert files.error(OpKind.WRITE, writing(tmp_path / "one", EXCLUSIVE), data=b"")[0] == errno.EEXIST


def test_write_flags(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "f"
    assert files.error(OpKind.WRITE, writing(path), data=b"x") == (errno.ENOENT, b"open")
    files.fine(OpKind.WRITE, writing(path, PARENTS), data=b"x")
    files.fine(OpKind.WRITE, writing(path, APPEND), data=b"y")
    assert path.read_text() == "xy"
    assert files.error(OpKind.WRITE, writing(path, EXCLUSIVE), data=b"z") == (errno.EEXIST, b"open")
    assert files.error(OpKind.WRITE, writing(tmp_path / "a"), data=b"z") == (errno.EISDIR, b"open")
    assert files.error(OpKind.WRITE, writing(f"{tmp_path}/new/"), data=b"z")[0] == errno.EISDIR


def test_a_file_appears_only_when_whole_and_cancel_leaves_nothing(files: Files, tmp_path: Path) -> None:
    op = files.guest.next_op()
    files.link.start(op, OpKind.WRITE, writing(tmp_path / "f"))
    files.link.send(encode_data(op, 0, 0, b"half"))
    files.link.until(lambda: files.link.results[op].started is not None)
    files.link.ping()
    assert not (tmp_path / "f").exists() and len(list(tmp_path.iterdir())) == 1
    files.link.send(encode(FrameType.CANCEL, op))
    assert files.link.wait(op).outcome == GuestOutcome.CANCELLED
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_leaves_nothing(files: Files) -> None:
    assert files.error(OpKind.WRITE, writing("/dev/full", APPEND), data=b"x") == (errno.EINVAL, b"open")
    limited = Path("/dev/shm", f"barchan-full-{files.guest.pid}")
    script = f"mount -t tmpfs -o size=64k none {limited}"
    limited.mkdir()
    assert os.system(script) == 0
    try:
        assert files.error(OpKind.WRITE, writing(limited / "f"), data=bytes(1 << 20)) == (errno.ENOSPC, b"write")
        assert list(limited.iterdir()) == []
        assert (
            files.error(OpKind.PUT_TREE, at(limited) + u32(0, KEEP, KEEP), data=item("f", content=bytes(1 << 20)))[0]
            == errno.ENOSPC
        )
    finally:
        os.system(f"umount {limited}")
        limited.rmdir()


def test_special_files_never_block(files: Files, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        for path, code in (
            (fifo, errno.EINVAL),
            (tmp_path / "s", errno.ENXIO),
            ("/dev/zero", errno.EINVAL),
            (tmp_path, errno.EISDIR),
        ):
            assert files.error(OpKind.READ, reading(path)) == (code, b"open")
        assert files.error(OpKind.WRITE, writing(fifo), data=b"x") == (errno.EINVAL, b"open")
        assert files.error(OpKind.WRITE, writing(fifo, APPEND), data=b"x") == (errno.ENXIO, b"open")
        assert files.error(OpKind.GET_TREE, at(fifo)) == (errno.EINVAL, b"open")
        assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_the_guests_own_secrets_are_out_of_reach(files: Files, tmp_path: Path) -> None:
    pid = files.guest.pid
    (tmp_path / "link").symlink_to("/proc/self/mem")
    for path in (
        "/proc/self/mem",
        f"/proc/{pid}/environ",
        "/proc/thread-self/maps",
        "/proc/self/fd/3",
        "/proc/self/root/etc/passwd",
        tmp_path / "link",
    ):
        assert files.error(OpKind.READ, reading(path))[0] in (errno.EACCES, errno.ELOOP), path
        assert files.error(OpKind.WRITE, writing(path, APPEND), data=b"x")[0] in (errno.EACCES, errno.ELOOP), path
        assert files.call(OpKind.WRITE, writing(path), data=b"x").outcome == GuestOutcome.FAILED
    assert files.error(OpKind.LIST, at("/proc/self/fd"), u32(1))[0] == errno.EACCES
    assert files.error(OpKind.MKDIR, at("/proc/self/fd/4/made/x"), u32(PARENTS, 0o755))[0] in (
        errno.EACCES,
        errno.ELOOP,
    )
    assert b"MemTotal" in files.fine(OpKind.READ, reading("/proc/meminfo"))


def test_an_ordinary_user_has_an_ordinary_users_rights(files: Files, open_dir: Path) -> None:
    secret, kept = open_dir / "secret", open_dir / "kept"
    secret.write_text("s")
    secret.chmod(0o600)
    kept.mkdir()
    (kept / "f").touch()
    for kind, parts, data in (
        (OpKind.READ, reading(secret), None), (OpKind.WRITE, writing(secret), b"x"), (OpKind.WRITE, writing(kept / "new"), b"x"),
        (OpKind.MKDIR, at(kept / "d") + u32(0, 0o755), None), (OpKind.REMOVE, at(kept) + u32(TREE), None),
        (OpKind.PUT_TREE, at(kept) + u32(0, KEEP, KEEP), item("f")), (OpKind.GET_TREE, at(secret), None),
    ):  # fmt: skip
        assert files.error(kind, parts, user=NOBODY, data=data)[0] == errno.EACCES, kind
    files.fine(OpKind.WRITE, writing(open_dir / "own"), user=NOBODY, data=b"mine")
    assert (open_dir / "own").stat().st_uid == 12345 and (open_dir / "own").stat().st_gid == 12345
    assert files.error(OpKind.WRITE, writing(open_dir / "given", uid=0), user=NOBODY, data=b"x") == (
        errno.EPERM,
        b"owner",
    )
    assert not (open_dir / "given").exists()
    assert files.fine(OpKind.READ, reading(secret)) == b"s"


def test_unknown_users(files: Files, tmp_path: Path) -> None:
    assert files.error(OpKind.STAT, at(tmp_path), b"\0", user=b"no-such-user") == (errno.ENOENT, b"user")


# ---- trees


def make_tree(root: Path) -> None:
    (root / "d" / "empty").mkdir(parents=True)
    (root / "d" / "big").write_bytes(os.urandom(3_000_000))
    (root / "d" / "none").touch()
    (root / "odd \xff\n name").write_text("odd")
    (root / "l").symlink_to("/etc/passwd")
    (root / "d" / "up").symlink_to("../l")
    os.mkfifo(root / "fifo")
    os.chown(root / "d" / "none", 77, 88)
    (root / "d" / "none").chmod(0o4711)
    (root / "d" / "empty").chmod(0o1730)
    for path in (root / "d" / "big", root / "d" / "empty", root / "d", root):
        os.utime(path, ns=(1, 1_234_567_890_123_456_789))


def facts(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        if stat.S_ISFIFO(status.st_mode):
            continue
        content: object = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        mtime = status.st_mtime_ns if not path.is_symlink() else 0
        found[str(path.relative_to(root))] = (
            stat.filemode(status.st_mode),
            status.st_uid,
            status.st_gid,
            mtime,
            content,
        )
    return found


def test_a_tree_there_and_back(files: Files, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    source.mkdir()
    make_tree(source)
    data = files.fine(OpKind.GET_TREE, at(source))
    listed = items(data)
    assert listed["fifo"][0].kind == "p" and listed["l"][0].target == b"/etc/passwd"
    assert listed["d/big"][1] == (source / "d" / "big").read_bytes()
    assert files.error(OpKind.PUT_TREE, at(target) + u32(0, KEEP, KEEP), data=data) == (errno.ENOENT, b"open")
    for _ in range(2):  # the second time over what is there
        files.fine(OpKind.PUT_TREE, at(target) + u32(PARENTS, KEEP, KEEP), data=data)
        assert facts(target) == facts(source)


def test_what_a_user_may_not_read_is_named_in_the_copy_and_skipped_on_arrival(files: Files, open_dir: Path) -> None:
    for name, mode in (("open", 0o644), ("closed", 0o600)):
        (open_dir / "from" / name).mkdir(parents=True)
        (open_dir / "from" / name / "f").write_text("inside")
        (open_dir / "from" / f"{name}.txt").write_text(name)
        (open_dir / "from" / f"{name}.txt").chmod(mode)
        (open_dir / "from" / name).chmod(mode | 0o111 * (name == "open"))
    data = files.fine(OpKind.GET_TREE, at(open_dir / "from"), user=NOBODY)
    found = items(data)
    assert {path: entry.kind for path, (entry, _) in found.items()} == {
        "": "d", "open": "d", "open/f": "f", "open.txt": "f", "closed": "x", "closed.txt": "x"
    }  # fmt: skip
    assert found["open.txt"][1] == b"open" and found["closed.txt"][0].mode == 0o600
    files.fine(OpKind.PUT_TREE, at(open_dir / "to") + u32(PARENTS, KEEP, KEEP), data=data)
    assert sorted(str(p.relative_to(open_dir / "to")) for p in (open_dir / "to").rglob("*")) == [
        "open",
        "open.txt",
        "open/f",
    ]
    listed = entries(files.fine(OpKind.LIST, at(open_dir / "from") + u32(9), user=NOBODY))
    assert {path: entry.kind for path, entry in listed.items()} == {
        "open": "d", "open/f": "f", "open.txt": "f", "closed": "d", "closed.txt": "f"
    }  # fmt: skip
    assert files.error(OpKind.GET_TREE, at(open_dir / "from" / "closed.txt"), user=NOBODY) == (errno.EACCES, b"open")


def test_get_tree_of_one_file(files: Files, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("content")
    ((path, (entry, content)),) = items(files.fine(OpKind.GET_TREE, at(tmp_path / "f"))).items()
    assert (path, entry.kind, content) == ("", "f", b"content")


def test_put_tree_for_an_owner_and_as_a_user(files: Files, open_dir: Path) -> None:
    data = item("d", "d", mode=0o755) + item("d/f", content=b"x", mode=0o640) + item("d/l", "l", target="f")
    files.fine(OpKind.PUT_TREE, at(open_dir / "a") + u32(PARENTS, 5, 6), data=data)
    assert {(p.lstat().st_uid, p.lstat().st_gid) for p in (open_dir / "a").rglob("*")} == {(5, 6)}
    files.fine(OpKind.PUT_TREE, at(open_dir / "b") + u32(PARENTS, KEEP, KEEP), user=NOBODY, data=data)
    assert {p.lstat().st_uid for p in (open_dir / "b").rglob("*")} == {12345}


HOSTILE = {
    "absolute": item("/tmp/escaped"),
    "dots": item("../escaped"),
    "dots inside": item("d/../../escaped"),
    "dot": item("./escaped"),
    "empty component": item("d//escaped"),
    "trailing slash": item("escaped/"),
    "no name": item(""),
    "file below a link": item("out/escaped"),
    "directory over a link": item("out", "d"),
    "file below a file": item("f/escaped"),
    "file over a directory": item("d"),
    "link made, then used": item("here", "l", target="..") + item("here/escaped"),
    "nul": item("a\0b"),
    "long name": item("n" * 256),
    "long path": item("/".join(["n" * 200] * 30)),
    "empty target": item("l", "l"),
    "unknown kind": item("x").replace(b"f\0\0\0", b"z\0\0\0", 1),
    "cut short": item("f", content=b"abc")[:-5],
    "cut in its head": item("f")[:20],
    "junk": b"\xff" * 100,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_items_touch_nothing_outside(files: Files, tmp_path: Path, name: str) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (target / "d").mkdir(parents=True)
    (target / "f").write_text("f")
    (target / "out").symlink_to(outside)
    done = files.call(OpKind.PUT_TREE, at(target) + u32(0, KEEP, KEEP), data=HOSTILE[name])
    assert done.outcome == GuestOutcome.FAILED and done.code, done
    assert [p.name for p in outside.iterdir()] == ["kept"]
    assert not list(tmp_path.rglob("escaped")) and not Path("/tmp/escaped").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outside", "target"]


def test_a_file_replaces_a_link_instead_of_following_it(files: Files, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("safe")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "f").symlink_to("../victim")
    files.fine(OpKind.PUT_TREE, at(tmp_path / "target") + u32(0, KEEP, KEEP), data=item("f", content=b"new"))
    assert (tmp_path / "victim").read_text() == "safe" and (tmp_path / "target" / "f").read_text() == "new"


@pytest.fixture
def leased(tmp_path: Path) -> Iterator[Path]:
    """A file on which somebody holds a lease that it does not give up when asked."""
    path = tmp_path / "tree" / "leased"
    path.parent.mkdir()
    path.write_text("held")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with path.open("r+") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield path
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    signal.signal(signal.SIGIO, before)


def test_what_is_leased_is_named_and_keeps_nothing_else_back(files: Files, leased: Path) -> None:
    (leased.parent / "other").write_text("free")
    assert files.error(OpKind.READ, reading(leased)) == (errno.EAGAIN, b"open")
    found = items(files.fine(OpKind.GET_TREE, at(leased.parent)))
    assert {path: (entry.kind, content) for path, (entry, content) in found.items()} == {
        "": ("d", b""), "other": ("f", b"free"), "leased": ("x", b"")
    }  # fmt: skip
    files.fine(OpKind.WRITE, writing(leased), data=b"new")
    assert leased.read_bytes() == b"new", "replaced, not opened"


@pytest.mark.parametrize("kind", [OpKind.GET_TREE, OpKind.LIST])
def test_a_tree_that_is_too_deep_is_called_that(files: Files, tmp_path: Path, kind: OpKind) -> None:
    deepest = tmp_path
    for _ in range(199):
        deepest /= "d"
    deepest.mkdir(parents=True)
    parts = at(tmp_path) + (u32(ALL_LEVELS) if kind == OpKind.LIST else b"")
    assert len(files.fine(kind, parts)) > 199
    (deepest / "d").mkdir()
    assert files.error(kind, parts) == (errno.ELOOP, b"depth")


def test_devices_in_a_tree_are_skipped(files: Files, tmp_path: Path) -> None:
    data = item("c", "c") + item("b", "b") + item("p", "p") + item("s", "s") + item("f", content=b"x")
    files.fine(OpKind.PUT_TREE, at(tmp_path) + u32(0, KEEP, KEEP), data=data)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("end", ["cancel", "cut"])
def test_an_interrupted_file_of_a_tree_leaves_the_old_one(files: Files, tmp_path: Path, end: str) -> None:
    (tmp_path / "f").write_text("old")
    op = files.guest.next_op()
    files.link.start(op, OpKind.PUT_TREE, at(tmp_path) + u32(0, KEEP, KEEP))
    pieces = blob(bytes(1 << 16)) * 2 * (wire.INPUT_WINDOW >> 16)  # credit for so much comes when it is being written
    files.link.feed(op, item("f")[:-4] + pieces, eof=end == "cut")
    assert (tmp_path / "f").read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    if end == "cancel":
        files.link.send(encode(FrameType.CANCEL, op))
    assert files.link.wait(op).outcome == (GuestOutcome.CANCELLED if end == "cancel" else GuestOutcome.FAILED)
    assert [p.name for p in tmp_path.iterdir()] == ["f"] and (tmp_path / "f").read_text() == "old"


def test_a_file_of_a_tree_that_cannot_be_dressed_leaves_the_old_one(files: Files, open_dir: Path) -> None:
    (open_dir / "f").write_text("old")
    data = item("f", content=b"new")
    parts = at(open_dir) + u32(0, 5, 6)  # an owner that an ordinary user cannot give
    assert files.error(OpKind.PUT_TREE, parts, user=NOBODY, data=data) == (errno.EPERM, b"owner")
    assert files.error(OpKind.PUT_TREE, parts, user=NOBODY, data=item("f", "l", target="t"))[0] == errno.EPERM
    assert [p.name for p in open_dir.iterdir()] == ["f"] and (open_dir / "f").read_text() == "old"


def test_cancel_of_a_transfer_that_waits(files: Files, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(5_000_000))
    files.link.acks = False
    for kind, parts in (
        (OpKind.READ, reading(tmp_path / "big")),
        (OpKind.GET_TREE, at(tmp_path)),
        (OpKind.PUT_TREE, at(tmp_path) + u32(0, KEEP, KEEP)),
    ):
        op = files.guest.next_op()
        files.link.start(op, kind, parts)
        files.link.until(lambda op=op: files.link.results[op].started is not None)  # type: ignore[misc]
        files.link.send(encode(FrameType.CANCEL, op))
        assert files.link.wait(op).outcome == GuestOutcome.CANCELLED


def test_a_large_transfer_does_not_hold_up_others(files: Files, tmp_path: Path) -> None:
    for i in range(3000):
        (tmp_path / f"f{i}").write_bytes(b"x" * 1000)
    op = files.guest.next_op()
    files.link.start(op, OpKind.GET_TREE, at(tmp_path))
    files.link.ping()
    assert files.call(OpKind.STAT, at(tmp_path), b"\0").code == 0
    files.link.wait(op)
    assert len(items(files.link.results[op].stdout)) == 3001


# ---- processes


def listed_processes(files: Files) -> dict[int, wire.GuestProcess]:
    cursor, found = Cursor(files.fine(OpKind.PROCESSES)), {}
    while cursor.left:
        process = wire.read_process(cursor)
        found[process.pid] = process
    return found


def test_processes_and_the_operation_that_they_belong_to(files: Files) -> None:
    guest, link = files.guest, files.link
    op = guest.next_op()
    result = link.start(op, OpKind.EXEC, exec_parts("sh", "-c", "setsid sleep 301 & echo $!"), user=b"12345")
    link.wait(op)
    link.forget(op)
    child, sleeping = int(result.stdout), (b"sleep", b"301")
    while (found := listed_processes(files))[child].argv != sleeping or found[child].state != "S":
        pass  # it is still on its way through two execs
    mine = found[child]
    assert [p.pid for p in found.values() if p.op == op] == [child]
    assert mine.uid == 12345 and mine.rss > 0 and mine.ppid == guest.pid
    assert guest.pid not in found and found[os.getpid()].op == 0


def test_input_cut_off_by_a_new_connection_is_sent_on(files: Files, tmp_path: Path) -> None:
    op = files.guest.next_op()
    files.link.start(op, OpKind.WRITE, writing(tmp_path / "f"))
    files.link.send(encode_data(op, 0, 0, b"first "))
    files.link.ping()
    link = Link(files.guest.path)
    (known,) = link.hello().ops
    assert (known.kind, known.taken, known.done) == (OpKind.WRITE, 6, False)
    link.results[op] = Result()
    link.send(encode_data(op, 0, 6, b"second") + encode_eof(op, 0, 12))
    assert link.wait(op).outcome == GuestOutcome.EXITED
    assert (tmp_path / "f").read_text() == "first second"
    link.close()
