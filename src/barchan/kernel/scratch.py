"""The scratch volume: one btrfs that holds the writable tree of every sandbox, each with a hard limit.

    DATA/scratch.img    fully allocated, so that a full host disk cannot turn the volume read-only
    DATA/scratch/       its mount, 0700 root, nosuid nodev
      <sandbox id>/     one subvolume: `u` (upper) and `w` (work) directories of an overlay
      .spare-<n>/       an empty one that the spawner keeps for a sandbox to come (native/trees.c)

It stays mounted when the agent ends, and is taken up as it is found.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from barchan.config import Layout
from barchan.errors import CreateFailed, FeatureMissing, NodeStorageFull, SandboxDiskFull
from barchan.kernel import btrfs, directories, loops, mounts, syscalls
from barchan.spec import MIB

Quota = Literal["simple", "ordinary"]
SMALLEST = 128 * MIB
"""Below it mkfs.btrfs refuses or has no room left for data."""
SPARE = 256 * MIB
"""Of the host's file system, left for the registry and the log."""
_TAKEN_APART = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
"""Seconds between looks."""
SCARCE_PART = 8
"""Little is free when it is less than this part of the volume."""
_ATTRIBUTES = syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV | syscalls.ATTR_NOATIME
PARTS = ("u", "w")
FROZEN = ".frozen-"
SPARE_TREE = "."
"""How the name of a spare tree begins, and that of no sandbox."""


class WritableTree(msgspec.Struct, frozen=True):
    """Of one sandbox: directories `u` and `w`, owned by 0:0, below `path`."""

    id: str
    path: Path


class Scratch:
    """A mounted scratch volume. Use `open`; `close` is for tests and for taking the installation down."""

    def __init__(self, root: Path, *, mounted: bool) -> None:
        self.root = root
        self._mounted = mounted
        self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @classmethod
    def open(cls, layout: Layout, size: int, quota: Quota = "simple", on: Path | None = None) -> Scratch:
        """Make the volume, or take up an existing one (whose size then stays as it is).

        `on`: a directory of a btrfs that the operator provides, instead of an image; it must be barchan's alone.
        Raises `NodeStorageFull` when the image does not fit, `FeatureMissing` when the host has no btrfs.
        """
        if on is not None:
            root = _given(on)
        else:
            root = layout.scratch
            directories.private(root)
            mounts.make_private(root)
            if not _is_mounted(root):
                _ready_image(layout.scratch_image, size)
                _mount(layout.scratch_image, root)
        with ExitStack() as undo:
            scratch = undo.enter_context(cls(root, mounted=on is None))
            with _typed("scratch"):
                btrfs.enable_quota(scratch._fd, simple=quota == "simple")
            undo.pop_all()
        return scratch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def release(self) -> None:
        """Let go of it and leave it mounted. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Unmount; the loop device goes with the mount. EBUSY when something still uses it. Idempotent."""
        self.release()
        if self._mounted:
            while mounts.top(self.root):
                syscalls.unmount(self.root)

    def space(self) -> tuple[int, int]:
        """Bytes: the size, and what is free."""
        stat = os.fstatvfs(self._fd)
        return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize

    @property
    def size(self) -> int:
        return self.space()[0]

    def free(self) -> int:
        return self.space()[1]

    def make(self, sandbox: str, disk_bytes: int) -> WritableTree:
        """An empty tree that can grow to `disk_bytes`. One left half-made by a killed process is replaced."""
        with _typed("scratch"):
            self._create(sandbox)
            try:
                self._fill(sandbox, disk_bytes)
            except OSError:
                self.drop(sandbox)
                raise
        return WritableTree(sandbox, self.root / sandbox)

    def _create(self, sandbox: str) -> None:
        try:
            btrfs.create_subvolume(self._fd, sandbox)
        except FileExistsError:
            self.drop(sandbox)
            btrfs.create_subvolume(self._fd, sandbox)

    def _fill(self, sandbox: str, disk_bytes: int) -> None:
        with self._tree(sandbox) as fd:
            os.fchmod(fd, 0o755)
            btrfs.write_in_place(fd)
            for part in PARTS:
                os.mkdir(part, 0o755, dir_fd=fd)
                os.chmod(part, 0o755, dir_fd=fd)
            btrfs.limit(fd, disk_bytes)

    def limit(self, sandbox: str, disk_bytes: int) -> None:
        with _typed("scratch"), self._tree(sandbox) as fd:
            btrfs.limit(fd, disk_bytes)

    def open_mount(self, sandbox: str) -> int:
        """A detached mount whose root is the sandbox's tree; the caller closes it."""
        return syscalls.open_tree(sandbox, dir_fd=self._fd, clone=True)

    @contextmanager
    def frozen(self, sandbox: str) -> Iterator[tuple[Path, Path]]:
        """The directory `u` of the tree as it is now, read-only, and an empty directory beside it that can share its blocks.

        Writers wait for milliseconds. Both go at the end, or with `thaw` if the process was killed. One at a time of a sandbox.
        """
        taken, stage = f"{FROZEN}{sandbox}", f"{FROZEN}{sandbox}.stage"
        with ExitStack() as undo:
            for name in (taken, stage):
                self.drop(name)
                undo.callback(self.drop, name)
            with _typed("scratch"):
                self._freeze(sandbox, taken, stage)
            yield self.root / taken / "u", self.root / stage / "tree"

    def _freeze(self, sandbox: str, taken: str, stage: str) -> None:
        with self._tree(sandbox) as fd:
            btrfs.snapshot(self._fd, taken, fd, read_only=True)
        btrfs.create_subvolume(self._fd, stage)
        with self._tree(stage) as fd:
            # As what it shares blocks with: the kernel refuses to mix the two kinds of files.
            btrfs.write_in_place(fd)
            os.mkdir("tree", 0o755, dir_fd=fd)

    def thaw(self) -> None:
        """Remove what killed processes left frozen."""
        with _typed("scratch"):
            for name in [name for name in self._all() if name.startswith(FROZEN)]:
                self.drop(name)

    def drop(self, sandbox: str) -> None:
        """Remove the tree; its space comes back a little later (see `sync`). Idempotent."""
        try:
            btrfs.delete_subvolume(self._fd, sandbox)
        except FileNotFoundError:
            return

    def usage(self, sandbox: str) -> int:
        """Bytes charged to the sandbox at the last commit."""
        with self._tree(sandbox) as fd:
            return btrfs.usage(fd, btrfs.subvolume_id(fd))

    def list(self) -> frozenset[str]:
        """Names of sandboxes."""
        return frozenset(name for name in self._all() if not name.startswith(SPARE_TREE))

    def _all(self) -> Iterator[str]:
        # By path: a btrfs directory shows what it held when the descriptor was opened.
        return (entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False))

    def commit(self) -> None:
        btrfs.commit(self._fd)

    def sync(self, timeout: float = 60.0) -> bool:
        """Wait until dropped trees gave back their space; False if that takes longer than `timeout` seconds."""
        stale = set(btrfs.qgroup_ids(self._fd))
        stale -= set(self._live_ids())
        cleaned = btrfs.wait_cleaned(self._fd, timeout)
        for number in stale:
            btrfs.remove_qgroup(self._fd, number)
        btrfs.settle_quota(self._fd)
        return cleaned

    def scarce(self) -> bool:
        """Whether so little is free that what was dropped should be given back now."""
        size, free = self.space()
        return free < size // SCARCE_PART

    def reclaim(self, timeout: float = 10.0) -> None:
        """Give dropped trees' space back, which the kernel would do half a minute later. Blocking.

        What they held is free with the commit after their removal, and the room of whole block groups once a thread of the
        kernel has taken those apart. On a volume that others fill, a third of a second is spent in vain.
        """
        btrfs.wait_cleaned(self._fd, timeout)
        btrfs.commit(self._fd)
        for pause in _TAKEN_APART:
            if not self.scarce():
                return
            time.sleep(pause)
            btrfs.commit(self._fd)

    def _live_ids(self) -> Iterator[int]:
        for name in self._all():
            try:
                with self._tree(name) as fd:
                    yield btrfs.subvolume_id(fd)
            except FileNotFoundError:
                continue

    @contextmanager
    def _tree(self, sandbox: str) -> Iterator[int]:
        fd = os.open(sandbox, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            yield fd
        finally:
            os.close(fd)


def default_size(layout: Layout, share: float, most: int) -> int:
    """`share` of what is free beside the data directory, at most `most` bytes, in whole MiB."""
    stat = os.statvfs(layout.data)
    return min(int(stat.f_bavail * stat.f_frsize * share), most) // MIB * MIB


def _given(path: Path) -> Path:
    if syscalls.filesystem_magic(path) != syscalls.MAGIC_BTRFS:
        raise FeatureMissing(
            f"{path} is not on btrfs", hint="give a directory of a btrfs, or none at all", phase="scratch"
        )
    path.chmod(0o700)
    return path


def _is_mounted(root: Path) -> bool:
    here = mounts.top(root)
    return here is not None and here.fstype == "btrfs" and syscalls.filesystem_magic(root) == syscalls.MAGIC_BTRFS


def _ready_image(image: Path, size: int) -> None:
    """Make it, or fill the holes of an existing one (which a copy or a discard left): its size stays."""
    if not image.exists():
        return _make_image(image, size)
    found = image.stat()
    if found.st_blocks * 512 < found.st_size:
        _fill_holes(image, found.st_size)


def _make_image(image: Path, size: int) -> None:
    """Under another name until it is complete, so that a file called scratch.img is always a whole volume."""
    part = image.with_suffix(".part")
    part.unlink(missing_ok=True)
    try:
        _allocate(part, size)
        make_filesystem(part)
        os.replace(part, image)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _allocate(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if size < SMALLEST or size > free - SPARE:
        raise NodeStorageFull(
            f"scratch volume of {size // MIB} MiB does not fit: {free // MIB} MiB free at {path.parent}",
            hint=f"free {SPARE // MIB} MiB more than its size (at least {SMALLEST // MIB} MiB), or set scratch_bytes",
            phase="scratch",
        )
    _fill_holes(path, size)


def _fill_holes(path: Path, size: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with _typed("scratch"):
            os.posix_fallocate(fd, 0, size)
            os.fsync(fd)
    finally:
        os.close(fd)


def make_filesystem(path: Path) -> None:
    """A btrfs on an image file. `FeatureMissing` without mkfs.btrfs, `CreateFailed` with its words."""
    # Without --nodiscard the blocks that were just allocated could be given back to the host. Quotas count metadata
    # once: kept twice, it would let sandboxes fill the volume with half of what they were promised.
    options = ("--quiet", "--nodiscard", "--data", "single", "--metadata", "single", "--label", "barchan-scratch")
    command = ("mkfs.btrfs", *options, str(path))
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise FeatureMissing("mkfs.btrfs is not installed", hint="install btrfs-progs", phase="scratch") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise CreateFailed(f"mkfs.btrfs failed on {path}: {said}", phase="scratch")


def _mount(image: Path, root: Path) -> None:
    with _typed("scratch"), loops.attached(image, direct_io=True) as device:
        options: tuple[syscalls.Option, ...] = (("source", device), ("nodiscard", None))
        fd = syscalls.new_mount("btrfs", options, _ATTRIBUTES)
        try:
            os.chmod(f"/proc/self/fd/{fd}", 0o700)
            syscalls.move_mount(fd, root)
        finally:
            os.close(fd)


@contextmanager
def _typed(phase: str) -> Iterator[None]:
    """The errors of the volume as ours."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NodeStorageFull(f"the scratch volume or its disk is full: {error}", phase=phase) from error
        if error.errno == errno.EDQUOT:
            raise SandboxDiskFull(f"the sandbox's disk limit is too small: {error}", phase=phase) from error
        if error.errno == errno.ENODEV:
            raise FeatureMissing(
                f"no btrfs in this kernel: {error}", hint="load the module btrfs", phase=phase
            ) from error
        raise CreateFailed(f"scratch volume: {error}", phase=phase) from error
