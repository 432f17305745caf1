"""Files and trees there and back: sizes, modes, owners, links, what is skipped, progress. On the whole path."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from barchan import Client, Limits, Sandbox, errors
from barchan.kernel import btrfs
from barchan.sync import Client as BlockingClient
from barchan.sync import Sandbox as BlockingSandbox
from tests.e2e.conftest import make_tiny
from tests.e2e.watch import flat_memory
from tests.server import Server, own_server

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
async def roomy(client: Client, tiny_env: str) -> AsyncIterator[Sandbox]:
    """With room for a hundred megabytes twice."""
    async with await client.create(tiny_env, limits=Limits(disk=300 * MIB)) as box:
        yield box


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def digest_inside(box: Sandbox, path: str) -> str:
    return (await box.run(["sha256sum", path])).text.split()[0]


class Steps:
    """A progress callback that checks what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int | None]] = []

    def __call__(self, done: int, total: int | None) -> None:
        assert not self.seen or done >= self.seen[-1][0], "never backwards"
        self.seen.append((done, total))

    def ends_with(self, size: int) -> bool:
        return self.seen[-1] == (size, size) and {total for _, total in self.seen} == {size}


@pytest.mark.parametrize("size", [0, 20_000, 100 * MIB], ids=["0 B", "20 KB", "100 MiB"])
async def test_a_file_there_and_back(server: Server, roomy: Sandbox, tmp_path: Path, size: int) -> None:
    """CASES 17: equal hashes, mode and time kept, missing directories made on both sides, memory flat, progress told."""
    local = tmp_path / "given"
    local.write_bytes(random.Random(17).randbytes(size))
    local.chmod(0o640)
    os.utime(local, ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
    up, down = Steps(), Steps()
    with flat_memory(server, roomy):
        sent = await roomy.files.upload(local, "/new/place/there", progress=up)
        got = await roomy.files.download("/new/place/there", tmp_path / "also/new/back", progress=down)
    assert (sent.files, sent.bytes, sent.skipped) == (got.files, got.bytes, got.skipped) == (1, size, {})
    assert digest(tmp_path / "also/new/back") == await digest_inside(roomy, "/new/place/there") == digest(local)
    inside, back = await roomy.files.stat("/new/place/there"), (tmp_path / "also/new/back").stat()
    assert (inside.mode, inside.uid, inside.gid, inside.mtime_ns) == (0o640, 0, 0, local.stat().st_mtime_ns)
    assert (back.st_mode & 0o7777, back.st_mtime_ns) == (0o640, local.stat().st_mtime_ns)
    assert up.seen and up.seen[-1][0] >= size
    assert down.ends_with(size) if size else down.seen
    assert size < MIB or (len(up.seen) > 20 and len(down.seen) > 20), "told while it goes on"


@pytest.mark.parametrize("size", [0, 20_000, 100 * MIB], ids=["0 B", "20 KB", "100 MiB"])
async def test_content_written_and_read(server: Server, roomy: Sandbox, tmp_path: Path, size: int) -> None:
    """CASES 17: from memory and from a file object; as a stream in flat memory; as a user, whose file it is then."""
    blob = random.Random(size).randbytes(size)
    (tmp_path / "blob").write_bytes(blob)
    steps = Steps()
    await roomy.files.write("/home/user/a/b", blob, mode=0o600, user="0:0", progress=steps)
    assert steps.ends_with(size) if size else not steps.seen or steps.ends_with(0)
    await roomy.run("chown user /home/user")
    with flat_memory(server, roomy), (tmp_path / "blob").open("rb") as file:
        await roomy.files.write("/home/user/c/d", file, user="user")
        seen = hashlib.sha256()
        async for chunk in roomy.files.read_stream("/home/user/c/d", user="user"):
            seen.update(chunk)
    assert seen.hexdigest() == hashlib.sha256(blob).hexdigest()
    assert await roomy.files.read("/home/user/a/b") == blob
    first, second, parent = [await roomy.files.stat(f"/home/user/{name}") for name in ("a/b", "c/d", "c")]
    assert (first.mode, first.uid, first.gid, first.size) == (0o600, 0, 0, size)
    assert (second.mode, second.uid, second.gid, second.size) == (0o644, 1000, 1000, size)
    assert (parent.kind, parent.uid, parent.gid) == ("directory", 1000, 1000), "parents are the user's, too"
    with pytest.raises(errors.FileDenied):
        await roomy.files.read("/home/user/a/b", user="user")
    with pytest.raises(errors.FileDenied):
        await roomy.files.write("/root/x", b"", user="user")
    with pytest.raises(errors.FileMissing):
        await roomy.files.write("/no/such/place", b"", parents=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What trees are made of, odd names and things that cannot be sent included."""
    root = tmp_path / "tree"
    (root / "sub/deeper").mkdir(parents=True)
    (root / "empty").mkdir(mode=0o700)
    (root / "sub/file").write_bytes(b"content" * 1000)
    (root / "sub/deeper/run").write_text("#!/bin/sh\necho ran\n")
    (root / "sub/deeper/run").chmod(0o755)
    (root / "zero").write_bytes(b"")
    (root / "set").write_bytes(b"x")
    (root / "set").chmod(0o4755)
    (root / "relative").symlink_to("sub/file")
    (root / "dangling").symlink_to("nowhere")
    (root / "absolute").symlink_to("/etc/passwd")
    (root / "sub/upwards").symlink_to("../zero")
    Path(os.fsdecode(os.fsencode(root) + b"/odd \xff\n'$")).write_bytes(b"odd")
    os.mkfifo(root / "fifo")
    os.mkfifo(root / "sub/fifo")
    os.utime(root / "sub/file", ns=(10**18, 10**18))
    os.utime(root / "sub", ns=(10**18, 10**18))
    return root


async def test_a_tree_there_and_back(sandbox: Sandbox, tree: Path, tmp_path: Path) -> None:
    """CASES 17: kinds, modes, times, links and odd names; FIFOs are skipped and reported; a link out does not come back."""
    sent = await sandbox.files.upload(tree, "/srv/new/tree")
    assert (sent.files, sent.bytes) == (5, 7000 + 19 + 0 + 1 + 3)
    assert set(sent.skipped) == {b"fifo", b"sub/fifo"}
    inside = {entry.path: entry for entry in await sandbox.files.list("/srv/new/tree", depth=9)}
    assert {(e.uid, e.gid) for e in inside.values()} == {(0, 0)}
    assert b"fifo" not in inside and b"odd \xff\n'$" in inside
    assert (inside[b"empty"].kind, inside[b"empty"].mode) == ("directory", 0o700)
    assert inside[b"sub/deeper/run"].mode == 0o755 and inside[b"sub/file"].mtime_ns == 10**18
    assert inside[b"sub"].mtime_ns == 10**18
    links = {path: entry.target for path, entry in inside.items() if entry.kind == "symlink"}
    assert links == {
        b"relative": b"sub/file",
        b"dangling": b"nowhere",
        b"absolute": b"/etc/passwd",
        b"sub/upwards": b"../zero",
    }
    assert (await sandbox.run("/srv/new/tree/sub/deeper/run; cat /srv/new/tree/relative | wc -c")).text == "ran\n7000\n"
    got = await sandbox.files.download("/srv/new/tree", tmp_path / "back/here")
    assert set(got.skipped) == {b"absolute"} and got.files == sent.files
    assert shape(tmp_path / "back/here") == shape(tree, without={b"fifo", b"sub/fifo", b"absolute"}, mask=0o777)


def shape(root: Path, without: frozenset[bytes] | set[bytes] = frozenset(), mask: int = 0o7777) -> dict[bytes, object]:
    """Everything of a tree that a transfer keeps."""
    found: dict[bytes, object] = {}
    for place, directories, files in os.walk(os.fsencode(root)):
        for name in (*directories, *files):
            path = os.path.join(place, name)
            facts = os.lstat(path)
            relative = os.path.relpath(path, os.fsencode(root))
            if relative in without:
                continue
            if os.path.islink(path):
                found[relative] = os.readlink(path)
            elif os.path.isfile(path):
                found[relative] = (facts.st_mode & mask, facts.st_mtime_ns, Path(os.fsdecode(path)).read_bytes())
            else:
                found[relative] = facts.st_mode & mask
    return found


async def test_a_tree_as_a_user(sandbox: Sandbox, tree: Path, tmp_path: Path) -> None:
    """CASES 17: it belongs to the user; what the user may not read comes back as skipped, what it may not write is refused."""
    await sandbox.run("chown user /home/user")
    await sandbox.files.upload(tree, "/home/user/mine", user="user")
    entries = await sandbox.files.list("/home/user/mine", depth=9)
    assert {(entry.uid, entry.gid) for entry in entries} == {(1000, 1000)}
    await sandbox.run(
        "cd /home/user/mine; chown root zero sub/deeper; chmod 600 zero; chmod 700 sub/deeper; mkfifo pipe"
    )
    got = await sandbox.files.download("/home/user/mine", tmp_path / "as user", user="user")
    assert {b"zero", b"pipe", b"absolute"} <= set(got.skipped)
    assert b"sub/deeper" in {path.removesuffix(b"/run") for path in got.skipped}
    assert not (tmp_path / "as user/zero").exists() and not (tmp_path / "as user/sub/deeper/run").exists()
    assert (tmp_path / "as user/sub/file").read_bytes() == b"content" * 1000
    with pytest.raises(errors.FileDenied):
        await sandbox.files.upload(tree, "/root/mine", user="user")
    assert not await sandbox.files.exists("/root/mine/zero")


async def test_many_small_files(sandbox: Sandbox, tmp_path: Path) -> None:
    """CASES 17: three thousand, in directories of any depth."""
    for i in range(3000):
        path = tmp_path / "many" / "/".join(f"d{i % n}" for n in range(1, 2 + i % 12)) / f"f{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % i * (i % 40))
    sent = await sandbox.files.upload(tmp_path / "many", "/many")
    got = await sandbox.files.download("/many", tmp_path / "back")
    assert sent.files == got.files == 3000
    assert shape(tmp_path / "back") == shape(tmp_path / "many")


# --- the platform alone

HUGE = 2 * GIB + 12_345


@pytest.fixture(scope="module")
def huge_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own, with room for it."""
    with own_server("huge", "--scratch-bytes", "4g") as server:
        server.run("env", "import", "tiny", str(make_tiny(tmp_path_factory.mktemp("tiny"))))
        yield server


def _free(fd: int) -> int:
    seen = os.fstatvfs(fd)
    return seen.f_bavail * seen.f_frsize


def give_back(server: Server, box: BlockingSandbox) -> None:
    """What was removed is free at once, and not half a minute later: neither volume nor limit has room for it twice."""
    fd = os.open(server.data / "scratch", os.O_RDONLY | os.O_DIRECTORY)
    end = time.monotonic() + 60
    try:
        while (used := box.stats().disk) > GIB or _free(fd) < HUGE + GIB // 4:
            assert time.monotonic() < end, f"{used} bytes are still charged, {_free(fd)} free"
            btrfs.commit(fd)
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def sparse(huge_server: Server) -> Iterator[Path]:
    """A file of 2 GiB that is nearly all hole."""
    place = huge_server.data.with_name(f"{huge_server.data.name}-files")
    place.mkdir()
    with (place / "sparse").open("wb") as file:
        file.truncate(HUGE)
        for at in (0, GIB - 3, 2 * GIB):
            file.seek(at)
            file.write(b"not a hole")
    yield place / "sparse"
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def huge_box(huge_server: Server) -> Iterator[str]:
    """One sandbox for both tests: the room of one that was removed comes back only after a while."""
    with (
        BlockingClient(data=huge_server.data) as client,
        client.create("tiny", limits=Limits(disk=5 * GIB // 2)) as box,
    ):
        yield box.id


def came_back(back: Path, sparse: Path, up: Steps, down: Steps) -> None:
    assert down.ends_with(HUGE) and len(up.seen) > 100
    with back.open("rb") as one, sparse.open("rb") as other:
        while piece := one.read(MIB):
            assert piece == other.read(MIB)
        assert not other.read(1)
    back.unlink()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_gigabytes_of_a_sparse_file(huge_server: Server, huge_box: str, sparse: Path) -> None:
    """CASES 17: the same there and back, progress to the end, memory flat everywhere."""
    back, up, down = sparse.with_name("back"), Steps(), Steps()
    async with Client(data=huge_server.data) as client:
        box = await client.get(huge_box)
        with flat_memory(huge_server, box):
            await box.files.upload(sparse, "/sparse", progress=up)
            await box.files.download("/sparse", back, progress=down)
        assert (await box.files.stat("/sparse")).size == HUGE
        await box.files.remove("/sparse")
    came_back(back, sparse, up, down)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_gigabytes_without_asyncio(huge_server: Server, huge_box: str, sparse: Path) -> None:
    """As the one before, on the same server and from the same file."""
    back, up, down = sparse.with_name("back"), Steps(), Steps()
    with BlockingClient(data=huge_server.data) as client:
        box = client.get(huge_box)
        give_back(huge_server, box)
        with flat_memory(huge_server, box):
            box.files.upload(sparse, "/sparse", progress=up)
            box.files.download("/sparse", back, progress=down)
        assert box.files.stat("/sparse").size == HUGE
        box.files.remove("/sparse")
    came_back(back, sparse, up, down)
