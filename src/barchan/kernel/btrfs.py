"""btrfs by ioctl: subvolumes, quota groups, and waiting for the cleaner.

Every function takes a descriptor of a directory on the file system. Failures are `OSError`s.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

_SUBVOL_CREATE, _SNAP_CREATE_V2, _SNAP_DESTROY = 0x5000940E, 0x50009417, 0x5000940F
_SYNC, _TREE_SEARCH, _INO_LOOKUP, _FS_INFO = 0x9408, 0xD0009411, 0xD0009412, 0x8400941F
_QUOTA_CTL, _QGROUP_CREATE, _QGROUP_LIMIT = 0xC0109428, 0x4010942A, 0x8030942B
_QUOTA_ENABLE, _QUOTA_ENABLE_SIMPLE = 1, 4
_QUOTA_RESCAN, _QUOTA_RESCAN_WAIT = 0x4040942C, 0x942E
_NO_SUBTREE_IS_TOO_DEEP = "8"
_SCANS = 5
_SETFLAGS, _NOCOW = 0x40086602, 0x00800000
_LIMIT_REFERENCED = 1
_READ_ONLY = 2
_NAME_MAX = 255
FIRST_SUBVOLUME = 256

_ROOT_TREE, _ORPHAN, _ORPHAN_ITEM = 1, (1 << 64) - 5, 48
_ALL = (1 << 64) - 1


def _named(fd: int, name: str) -> bytearray:
    raw = os.fsencode(name)
    if not raw or len(raw) > _NAME_MAX or b"/" in raw:
        raise OSError(errno.EINVAL, f"not a subvolume name: {name!r}")
    # A bytearray, because fcntl.ioctl copies immutable arguments through a buffer of 1024 bytes.
    return bytearray(struct.pack("=q4088s", fd, raw))


def create_subvolume(parent: int, name: str) -> None:
    fcntl.ioctl(parent, _SUBVOL_CREATE, _named(0, name))


def delete_subvolume(parent: int, name: str) -> None:
    """Its space comes back when the cleaner ran: see `wait_cleaned`."""
    fcntl.ioctl(parent, _SNAP_DESTROY, _named(0, name))


def snapshot(parent: int, name: str, source: int, *, read_only: bool = False) -> None:
    raw = os.fsencode(name)
    flags = _READ_ONLY if read_only else 0
    fcntl.ioctl(parent, _SNAP_CREATE_V2, bytearray(struct.pack("=qQQ4Q4040s", source, 0, flags, 0, 0, 0, 0, raw)))


def enable_quota(fd: int, *, simple: bool) -> None:
    """Simple quotas need kernel 6.7. Enabled already: the kind stays. Afterwards the limits hold."""
    command = _QUOTA_ENABLE_SIMPLE if simple else _QUOTA_ENABLE
    try:
        fcntl.ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("=2Q", command, 0)))
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise
    settle_quota(fd)


def settle_quota(fd: int) -> None:
    """Make ordinary quotas count. While they are `inconsistent` (at first, after dropping a deep subvolume, after a
    crash) the kernel lets writes past the limit as soon as they reached the disk."""
    if quota_mode(fd) != "ordinary":
        return
    with contextlib.suppress(FileNotFoundError):
        (_qgroups(fd) / "drop_subtree_threshold").write_text(_NO_SUBTREE_IS_TOO_DEEP)
    for _ in range(_SCANS):
        if not _inconsistent(fd):
            return
        try:
            fcntl.ioctl(fd, _QUOTA_RESCAN, bytearray(64))
        except OSError as error:
            if error.errno != errno.EINPROGRESS:
                raise
        fcntl.ioctl(fd, _QUOTA_RESCAN_WAIT)
    raise OSError(errno.EAGAIN, f"quotas do not settle after {_SCANS} scans")


def _inconsistent(fd: int) -> bool:
    return (_qgroups(fd) / "inconsistent").read_text().strip() == "1"


def limit(subvolume: int, size: int) -> None:
    """At most `size` bytes in the subvolume that the descriptor is in; more is EDQUOT."""
    fcntl.ioctl(subvolume, _QGROUP_LIMIT, bytearray(struct.pack("=6Q", 0, _LIMIT_REFERENCED, size, 0, 0, 0)))


def write_in_place(directory: int) -> None:
    """Of a directory without files: what is made below it is never compressed, and it refuses to be set so.

    Compression is done by kernel threads, outside of every CPU limit. Its price is that file contents have no
    checksums and a crash can leave a half-written one. Limits and snapshots work as before.
    """
    fcntl.ioctl(directory, _SETFLAGS, bytearray(struct.pack("=I", _NOCOW)))


def remove_qgroup(fd: int, subvolume_id: int) -> None:
    """Of a subvolume that is gone. Idempotent."""
    try:
        fcntl.ioctl(fd, _QGROUP_CREATE, bytearray(struct.pack("=2Q", 0, subvolume_id)))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EBUSY):
            raise


def subvolume_id(fd: int) -> int:
    args = bytearray(struct.pack("=2Q4080s", 0, FIRST_SUBVOLUME, b""))
    fcntl.ioctl(fd, _INO_LOOKUP, args)
    return int(struct.unpack_from("=Q", args)[0])


def uuid(fd: int) -> str:
    args = bytearray(1024)
    fcntl.ioctl(fd, _FS_INFO, args)
    raw = args[16:32].hex()
    return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))


def _qgroups(fd: int) -> Path:
    return Path("/sys/fs/btrfs") / uuid(fd) / "qgroups"


def quota_mode(fd: int) -> str:
    """Either "simple" or "ordinary"; "" when quotas are off. Kernels before 6.7 know only the ordinary kind."""
    try:
        if (_qgroups(fd) / "enabled").read_text().strip() != "1":
            return ""
        return "simple" if (_qgroups(fd) / "mode").read_text().strip() == "squota" else "ordinary"
    except FileNotFoundError:
        return "ordinary" if _qgroups(fd).is_dir() else ""


def usage(fd: int, subvolume: int) -> int:
    """Bytes a subvolume is charged with, as of the last commit at the latest."""
    return int((_qgroups(fd) / f"0_{subvolume}" / "referenced").read_text())


def qgroup_ids(fd: int) -> Iterator[int]:
    """Subvolume ids that have a quota group, dead ones included."""
    for entry in _qgroups(fd).glob("0_*"):
        number = int(entry.name[2:])
        if number >= FIRST_SUBVOLUME:
            yield number


def commit(fd: int) -> None:
    """Write everything out. Also wakes the thread that cleans deleted subvolumes."""
    fcntl.ioctl(fd, _SYNC)


def dead_subvolumes(fd: int) -> int:
    """Deleted subvolumes that the cleaner has not finished: their orphan items in the root tree."""
    key = struct.pack(
        "=7Q4I4Q", _ROOT_TREE, _ORPHAN, _ORPHAN, 0, _ALL, 0, _ALL, _ORPHAN_ITEM, _ORPHAN_ITEM, 4096, 0, 0, 0, 0, 0
    )
    args = bytearray(key.ljust(4096, b"\0"))
    fcntl.ioctl(fd, _TREE_SEARCH, args)
    return int(struct.unpack_from("=I", args, 64)[0])


def wait_cleaned(fd: int, timeout: float) -> bool:
    """Commit and wait until deleted subvolumes gave back their space; False when it took longer than `timeout` s."""
    end = time.monotonic() + timeout
    pause = 0.005
    while True:
        commit(fd)
        if not dead_subvolumes(fd):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.25)
