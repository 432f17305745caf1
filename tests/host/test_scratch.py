"""The scratch volume on a real disk: hard limits, recovery, and a full host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan.config import Layout
from barchan.errors import FeatureMissing, NodeStorageFull
from barchan.kernel import btrfs, loops, mounts, probe, scratch, syscalls
from barchan.kernel.scratch import Quota, Scratch
from barchan.spec import GIB, MIB
from tests import server

SIZE = 192 * MIB
LIMIT = 16 * MIB
PROGRAM = """
import sys
from pathlib import Path
from barchan.config import Layout
from barchan.kernel.scratch import Scratch
scratch = Scratch.open(Layout(Path(sys.argv[1])), int(sys.argv[2]))
scratch.make("left", 1 << 24)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def layout() -> Iterator[Layout]:
    if os.geteuid():
        pytest.skip("mounting needs root")
    disk = next((base for base in server.disks() if shutil.disk_usage(base).free > 2 * GIB), None)
    if disk is None:
        pytest.skip("no disk with 2 GiB free")
    path = Path(tempfile.mkdtemp(prefix="barchan-scratch-", dir=disk))
    try:
        yield Layout(path)
    finally:
        for below in (path / "scratch", path / "host/scratch", path / "host"):
            while mounts.top(below):
                syscalls.unmount(below)
        shutil.rmtree(path)


@pytest.fixture(params=["simple", "ordinary"])
def quota(request: pytest.FixtureRequest, layout: Layout) -> Quota:
    if request.param == "simple" and probe.examine(layout).quota != "simple":
        pytest.skip("this kernel has no simple quotas")
    kind: Quota = request.param
    return kind


@pytest.fixture
def volume(layout: Layout, quota: Quota) -> Iterator[Scratch]:
    with Scratch.open(layout, SIZE, quota) as volume:
        yield volume


def fill(path: Path, size: int, zeros: bool = False) -> None:
    """Bytes that nothing can compress away (or zeros), down to the disk."""
    with path.open("wb", buffering=0) as file:
        for _ in range(size // MIB):
            file.write(bytes(MIB) if zeros else os.urandom(MIB))
        os.fsync(file.fileno())


def test_tree_is_an_empty_pair_owned_by_root(volume: Scratch) -> None:
    tree = volume.make("a", LIMIT)
    assert sorted(os.listdir(tree.path)) == ["u", "w"]
    for part in ("u", "w"):
        found = (tree.path / part).stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (0, 0, 0o755)
    assert volume.list() == {"a"}


def test_what_was_dropped_can_be_written_again_at_once(volume: Scratch) -> None:
    """Control: without `reclaim` it stays full for as long as the kernel likes."""
    flood, neighbour = volume.make("flood", SIZE), volume.make("neighbour", SIZE)
    with pytest.raises(OSError, match="No space|quota"):
        fill(flood.path / "u" / "f", SIZE)
    assert volume.scarce()
    volume.drop("flood")
    with pytest.raises(OSError, match="No space"):
        fill(neighbour.path / "u" / "f", SIZE // 2)
    assert volume.scarce()
    volume.reclaim()
    assert not volume.scarce()
    fill(neighbour.path / "u" / "f", SIZE // 2)


def test_volume_is_closed_to_others(volume: Scratch, layout: Layout) -> None:
    assert layout.scratch.stat().st_mode & 0o777 == 0o700
    assert layout.scratch_image.stat().st_mode & 0o777 == 0o600
    flags = os.statvfs(layout.scratch).f_flag
    assert flags & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOATIME) == os.ST_NOSUID | os.ST_NODEV | os.ST_NOATIME
    here = mounts.top(layout.scratch)
    assert here is not None
    assert not here.shared


def test_image_is_fully_allocated_through_direct_io(volume: Scratch, layout: Layout) -> None:
    found = layout.scratch_image.stat()
    assert found.st_size == SIZE
    assert found.st_blocks * 512 >= SIZE
    device = loops.find(layout.scratch_image)
    assert device is not None
    assert Path("/sys/block", Path(device).name, "loop/dio").read_text().strip() == "1"


def test_quotas_count_from_the_first_write(volume: Scratch) -> None:
    """Ordinary ones do not until the first scan is over, and again after a deep subvolume was dropped."""
    groups = btrfs._qgroups(volume._fd)
    assert (groups / "inconsistent").read_text().strip() == "0"
    if btrfs.quota_mode(volume._fd) == "ordinary":
        assert int((groups / "drop_subtree_threshold").read_text()) >= 8


def test_umask_does_not_matter(volume: Scratch) -> None:
    old = os.umask(0o077)
    try:
        tree = volume.make("a", LIMIT)
    finally:
        os.umask(old)
    assert (tree.path / "u").stat().st_mode & 0o777 == 0o755


def test_limit_is_hard_and_the_neighbour_unharmed(volume: Scratch) -> None:
    a, b = volume.make("a", LIMIT), volume.make("b", LIMIT)
    with pytest.raises(OSError, match="quota exceeded"):
        fill(a.path / "u/big", 2 * LIMIT)
    fill(b.path / "u/fits", LIMIT // 2)
    volume.commit()
    assert LIMIT // 2 < volume.usage("a") <= LIMIT
    assert LIMIT // 2 <= volume.usage("b") < LIMIT


def charged_within_limit(volume: Scratch, name: str) -> bool:
    volume.commit()
    return volume.usage(name) <= LIMIT


def test_compression_cannot_be_asked_for(volume: Scratch) -> None:
    """The kernel would do it in threads of its own, outside of the sandbox's CPU limit."""
    tree = volume.make("a", LIMIT)
    below = tree.path / "u/below"
    below.mkdir()
    for path in (tree.path / "u", tree.path / "w", below):
        with pytest.raises(OSError, match="Invalid argument"):
            os.setxattr(path, "btrfs.compression", b"zstd")
    fill(below / "zeros", LIMIT // 2, zeros=True)
    with pytest.raises(OSError, match="Invalid argument"):
        os.setxattr(below / "zeros", "btrfs.compression", b"zstd")
    volume.commit()
    assert volume.usage("a") >= LIMIT // 2


def test_compression_would_work_outside_of_trees(volume: Scratch) -> None:
    """The control of the test above."""
    btrfs.create_subvolume(volume._fd, "plain")
    os.setxattr(volume.root / "plain", "btrfs.compression", b"zstd")
    fill(volume.root / "plain/zeros", LIMIT // 2, zeros=True)
    volume.commit()
    assert volume.usage("plain") < LIMIT // 8


def test_sparse_and_reserved_files_are_limited(volume: Scratch) -> None:
    path = volume.make("a", LIMIT).path / "u/sparse"
    with path.open("wb", buffering=0) as file:
        file.truncate(1 << 40)
        with pytest.raises(OSError, match="quota exceeded"):
            for step in range(2 * LIMIT // MIB):
                os.pwrite(file.fileno(), os.urandom(MIB), step << 30)
        os.fsync(file.fileno())
    assert charged_within_limit(volume, "a")
    with (
        (volume.make("b", LIMIT).path / "u/reserved").open("wb") as file,
        pytest.raises(OSError, match="quota exceeded"),
    ):
        os.posix_fallocate(file.fileno(), 0, 2 * LIMIT)
    assert charged_within_limit(volume, "b")


def test_overwriting_costs_nothing(volume: Scratch) -> None:
    path = volume.make("a", LIMIT).path / "u/file"
    fill(path, LIMIT // 2)
    with path.open("r+b", buffering=0) as file:
        for _ in range(5):
            os.pwrite(file.fileno(), os.urandom(LIMIT // 4), 0)
            os.fsync(file.fileno())
    volume.commit()
    assert volume.usage("a") < LIMIT * 3 // 4


def test_snapshot_keeps_what_the_tree_overwrites(volume: Scratch) -> None:
    tree = volume.make("a", LIMIT)
    path = tree.path / "u/file"
    fill(path, MIB)
    old = path.read_bytes()
    fd = os.open(tree.path, os.O_RDONLY)
    try:
        btrfs.snapshot(volume._fd, "b", fd)
    finally:
        os.close(fd)
    with path.open("r+b", buffering=0) as file:
        file.write(b"new")
        os.fsync(file.fileno())
    assert (volume.root / "b/u/file").read_bytes() == old
    assert path.read_bytes() == b"new" + old[3:]
    with pytest.raises(OSError, match="Invalid argument"):
        os.setxattr(volume.root / "b/u", "btrfs.compression", b"zstd")


def test_metadata_is_stored_once_as_it_is_charged(volume: Scratch) -> None:
    """Empty files are metadata only."""
    directory = volume.make("a", LIMIT).path / "u"
    volume.commit()
    before = used(volume)
    with pytest.raises(OSError, match="quota exceeded"):
        for number in range(1_000_000):
            os.close(os.open(directory / f"{number:0200}", os.O_WRONLY | os.O_CREAT, 0o600))
    volume.commit()
    charged = volume.usage("a")
    assert LIMIT // 2 < charged <= LIMIT
    assert used(volume) - before < charged * 1.3


def used(volume: Scratch) -> int:
    stat = os.fstatvfs(volume._fd)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def test_larger_limit_lets_the_same_file_fit(volume: Scratch) -> None:
    """The control of the test above."""
    tree = volume.make("a", 3 * LIMIT)
    fill(tree.path / "u/big", 2 * LIMIT)


def test_mount_is_a_clone_at_the_tree(volume: Scratch) -> None:
    tree = volume.make("a", LIMIT)
    volume.make("b", LIMIT)
    fd = volume.open_mount("a")
    try:
        assert sorted(os.listdir(f"/proc/self/fd/{fd}")) == ["u", "w"]
        assert os.stat("..", dir_fd=fd).st_ino == os.fstat(fd).st_ino, "the parent can be reached"
        Path(f"/proc/self/fd/{fd}/u/file").touch()
        assert (tree.path / "u/file").exists()
    finally:
        os.close(fd)


def test_dropped_trees_give_back_their_space(volume: Scratch) -> None:
    for name in "abcde":
        fill(volume.make(name, LIMIT).path / "u/file", LIMIT // 2)
    volume.commit()
    full = volume.free()
    for name in "abcde":
        volume.drop(name)
        volume.drop(name)
    assert volume.list() == frozenset()
    assert volume.sync(60)
    assert volume.free() > full + LIMIT
    assert not list(btrfs.qgroup_ids(volume._fd)), "a quota group is left for each dropped tree"


def test_sync_keeps_the_limits_of_the_living(volume: Scratch) -> None:
    tree = volume.make("a", LIMIT)
    volume.make("b", LIMIT)
    volume.drop("b")
    assert volume.sync(60)
    with pytest.raises(OSError, match="quota exceeded"):
        fill(tree.path / "u/big", 2 * LIMIT)


def test_dropping_while_a_clone_is_held(volume: Scratch) -> None:
    """A sandbox that died badly may pin its tree for a moment."""
    volume.make("a", LIMIT)
    fd = volume.open_mount("a")
    try:
        volume.drop("a")
        assert volume.list() == frozenset()
        volume.make("a", LIMIT)
    finally:
        os.close(fd)


def test_making_again_starts_empty(volume: Scratch) -> None:
    fill(volume.make("a", LIMIT).path / "u/old", MIB)
    assert sorted(os.listdir(volume.make("a", LIMIT).path / "u")) == []


def test_full_volume_has_its_own_error(volume: Scratch) -> None:
    tree = volume.make("a", 10 * SIZE)
    with pytest.raises(OSError, match="No space left"):
        fill(tree.path / "u/big", 2 * SIZE)


def test_reopened_as_it_was_left(layout: Layout, quota: Quota) -> None:
    with Scratch.open(layout, SIZE, quota) as volume:
        fill(volume.make("a", LIMIT).path / "u/file", MIB)
    assert loops.find(layout.scratch_image) is None
    assert mounts.top(layout.scratch) is None
    with Scratch.open(layout, 2 * SIZE, quota) as volume:
        assert volume.list() == {"a"}
        assert layout.scratch_image.stat().st_size == SIZE
        assert btrfs.quota_mode(volume._fd) == quota
        with pytest.raises(OSError, match="quota exceeded"):
            fill(volume.root / "a/u/big", 2 * LIMIT)
        volume.close()
        volume.close()


def test_kill_9_leaves_the_volume_to_the_next_agent(layout: Layout) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(layout.data), str(SIZE)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout
        assert child.stdout.readline() == b"\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(10) == -9
    device = loops.find(layout.scratch_image)
    assert device is not None
    with Scratch.open(layout, SIZE) as volume:
        assert volume.list() == {"left"}
        assert loops.find(layout.scratch_image) == device
        assert len([m for m in mounts.current() if m.path == str(layout.scratch)]) == 2, (
            "the volume and its private place"
        )


def test_mount_hidden_elsewhere_is_shared_not_doubled(layout: Layout) -> None:
    """A process with its own mount namespace pins the volume invisibly. A second loop device would be a second file
    system over the same blocks."""
    volume = Scratch.open(layout, SIZE)
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; read x; ls $1/a/u", "sh"]
    with subprocess.Popen([*argv, layout.scratch], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdout.readline() == b"\n"
        volume.close()
        assert mounts.top(layout.scratch) is None
        with Scratch.open(layout, SIZE) as again:
            (again.make("a", LIMIT).path / "u/new").touch()
            assert devices_over(layout.scratch_image) == 1
            seen, _ = child.communicate(b"\n")
    assert seen == b"new\n"


def devices_over(image: Path) -> int:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return sum(file.read_text().strip() == str(image) for file in files)


def test_half_made_image_is_made_again(layout: Layout) -> None:
    layout.scratch_image.with_suffix(".part").write_bytes(b"junk")
    with Scratch.open(layout, SIZE) as volume:
        volume.make("a", LIMIT)
    assert not layout.scratch_image.with_suffix(".part").exists()


@pytest.mark.parametrize("size", [1 << 50, 1 * MIB])
def test_size_that_does_not_fit_is_refused_and_leaves_nothing(layout: Layout, size: int) -> None:
    with pytest.raises(NodeStorageFull) as caught:
        Scratch.open(layout, size)
    assert "MiB free" in caught.value.message
    assert caught.value.hint
    assert not layout.scratch_image.exists()
    assert not layout.scratch_image.with_suffix(".part").exists()


def test_directory_of_an_operators_btrfs(layout: Layout, quota: Quota) -> None:
    given = Layout(layout.data)
    with Scratch.open(given, SIZE, quota) as outer:
        directory = outer.root / "for-barchan"
        directory.mkdir()
        with Scratch.open(Layout(layout.data / "other"), SIZE, quota, on=directory) as volume:
            tree = volume.make("a", LIMIT)
            with pytest.raises(OSError, match="quota exceeded"):
                fill(tree.path / "u/big", 2 * LIMIT)
        assert directory.exists()
    with pytest.raises(FeatureMissing, match="not on btrfs"):
        Scratch.open(given, SIZE, quota, on=layout.data)


@contextmanager
def small_host(layout: Layout, size: int) -> Iterator[Layout]:
    """A data directory on a small ext4 of its own, to be filled to the last block."""
    image, root = layout.data / "host.img", layout.data / "host"
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    root.mkdir()
    with loops.attached(image) as device:
        fd = syscalls.new_mount("ext4", (("source", device),))
        syscalls.move_mount(fd, root)
        os.close(fd)
    try:
        yield Layout(root)
    finally:
        syscalls.unmount(root)


def use_up(root: Path) -> None:
    """Every block the file system still gives."""
    fd = os.open(root / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        at, step = 0, 8 * MIB
        while step >= 4096:
            try:
                os.posix_fallocate(fd, at, step)
                at += step
            except OSError:
                step //= 2
    finally:
        os.close(fd)


def test_full_host_disk_does_not_touch_the_volume(layout: Layout) -> None:
    with small_host(layout, 640 * MIB) as host, Scratch.open(host, SIZE) as volume:
        tree = volume.make("a", SIZE)
        use_up(host.data)
        with pytest.raises(OSError, match="No space left"):
            fill(host.data / "more", MIB)
        fill(tree.path / "u/big", 64 * MIB)
        fill(volume.make("b", LIMIT).path / "u/file", MIB)
        volume.commit()
        assert not os.fstatvfs(volume._fd).f_flag & os.ST_RDONLY


def test_full_host_disk_breaks_a_sparse_volume(layout: Layout) -> None:
    """The control of the test above: this is why the image is fully allocated."""
    with small_host(layout, 640 * MIB) as host:
        with host.scratch_image.open("wb") as file:
            file.truncate(SIZE)
        scratch.make_filesystem(host.scratch_image)
        host.scratch.mkdir()
        scratch._mount(host.scratch_image, host.scratch)
        use_up(host.data)
        try:
            with pytest.raises(OSError, match=r"Input/output error|Read-only|No space"):
                fill(host.scratch / "big", 64 * MIB)
            with pytest.raises(OSError, match=r"Input/output error|Read-only"):
                commit_and_touch(host.scratch)
        finally:
            syscalls.unmount(host.scratch)


def commit_and_touch(root: Path) -> None:
    fd = os.open(root, os.O_RDONLY)
    try:
        for number in range(2000):
            (root / f"other-{number}").write_bytes(os.urandom(1500))
            if not number % 100:
                btrfs.commit(fd)
    finally:
        os.close(fd)


def test_holes_of_an_existing_image_are_filled(layout: Layout) -> None:
    with layout.scratch_image.open("wb") as file:
        file.truncate(SIZE)
    scratch.make_filesystem(layout.scratch_image)
    with Scratch.open(layout, SIZE) as volume:
        assert layout.scratch_image.stat().st_blocks * 512 >= SIZE
        volume.make("a", LIMIT)


def test_default_size_is_a_share_of_what_is_free(layout: Layout) -> None:
    free = shutil.disk_usage(layout.data).free
    assert scratch.default_size(layout, 0.3, 1 * GIB) == 1 * GIB
    assert abs(scratch.default_size(layout, 0.1, 1 << 60) - free // 10) < 256 * MIB
