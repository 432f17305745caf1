"""System calls that the standard library lacks, as thin typed wrappers.

Every failure is an `OSError` with the errno, the call's name and, for mounts, what the kernel wrote to the
file system context. Descriptors returned are close-on-exec and belong to the caller.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from pathlib import Path

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 4
FSOPEN_CLOEXEC = FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_SET_FD, FSCONFIG_CMD_CREATE = 0, 1, 5, 6
MNT_DETACH = 2
MS_BIND = 4096

ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
ATTR_NOATIME, ATTR_IDMAP = 0x10, 0x100000
PRIVATE = 1 << 18

RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 1, 2, 4, 8

MAGIC_BTRFS, MAGIC_EROFS = 0x9123683E, 0xE0F5E1E2

# The same numbers on every architecture: all were added after the tables were unified.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_OPENAT2 = 437

_libc = ctypes.CDLL(None, use_errno=True)
_Long, _Bytes = ctypes.c_long, ctypes.c_char_p

Option = tuple[str, str | int | None]
"""Of a file system: (name, text), (name, descriptor) or (flag, None)."""


def oserror(name: str, detail: str = "") -> OSError:
    number = ctypes.get_errno()
    said = f": {detail}" if detail else ""
    return OSError(number, f"{name}: {os.strerror(number)}{said}")


def _call(name: str, number: int, *args: object) -> int:
    result: int = _libc.syscall(_Long(number), *args)
    if result < 0:
        raise oserror(name)
    return result


def open_tree(path: str | Path, *, dir_fd: int = AT_FDCWD, clone: bool = False, recursive: bool = False) -> int:
    """The mount at `path`; with `clone` a detached copy of it, whose root is `path`. "" means `dir_fd` itself."""
    flags = OPEN_TREE_CLOEXEC | (OPEN_TREE_CLONE if clone else 0) | (AT_RECURSIVE if recursive else 0)
    flags |= AT_EMPTY_PATH if str(path) == "" else 0
    return _call(f"open_tree {path}", _OPEN_TREE, _Long(dir_fd), _Bytes(os.fsencode(path)), _Long(flags))


def open_beneath(path: bytes, flags: int, *, dir_fd: int, mode: int = 0) -> int:
    """openat2(2) of a relative path: no link on the way or at its end, never out of the directory or its mount.

    A subvolume in a btrfs counts as another mount only if it is mounted: compare `st_dev`. "" is no path; "." is `dir_fd`.
    """
    how = RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH
    packed = struct.pack("3Q", flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, how)
    return _call("openat2", _OPENAT2, _Long(dir_fd), _Bytes(path), packed, _Long(len(packed)))


def move_mount(fd: int, target: Path) -> None:
    """Attach the mount `fd`, detached or not, at `target`."""
    _call(
        f"move_mount {target}",
        _MOVE_MOUNT,
        _Long(fd),
        _Bytes(b""),
        _Long(AT_FDCWD),
        _Bytes(os.fsencode(target)),
        _Long(MOVE_MOUNT_F_EMPTY_PATH),
    )


def new_mount(fstype: str, options: Iterable[Option], attributes: int = 0) -> int:
    """A detached mount of a new file system context. The kernel's own words are in the exception."""
    context = _call(f"fsopen {fstype}", _FSOPEN, _Bytes(fstype.encode()), _Long(FSOPEN_CLOEXEC))
    try:
        for option in options:
            _configure(context, option)
        _fsconfig(context, FSCONFIG_CMD_CREATE, None, None, 0)
        return _call("fsmount", _FSMOUNT, _Long(context), _Long(FSMOUNT_CLOEXEC), _Long(attributes))
    except OSError as error:
        said = _context_log(context)
        raise OSError(error.errno, f"mount {fstype}: {error.strerror}" + (f" ({said})" if said else "")) from error
    finally:
        os.close(context)


def accepts(fstype: str, options: Iterable[Option]) -> bool:
    """Whether this kernel knows a file system and its options; mounts nothing."""
    try:
        context = _call(f"fsopen {fstype}", _FSOPEN, _Bytes(fstype.encode()), _Long(FSOPEN_CLOEXEC))
    except OSError as error:
        if error.errno == errno.ENODEV:
            return False
        raise
    try:
        for option in options:
            _configure(context, option)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(context)
    return True


def _configure(context: int, option: Option) -> None:
    key, value = option
    if value is None:
        _fsconfig(context, FSCONFIG_SET_FLAG, key, None, 0)
    elif isinstance(value, int):
        _fsconfig(context, FSCONFIG_SET_FD, key, None, value)
    else:
        _fsconfig(context, FSCONFIG_SET_STRING, key, value, 0)


def _fsconfig(context: int, command: int, key: str | None, value: str | None, aux: int) -> None:
    _call(
        f"fsconfig {key or 'create'}",
        _FSCONFIG,
        _Long(context),
        _Long(command),
        _Bytes(key.encode() if key else None),
        _Bytes(os.fsencode(value) if value is not None else None),
        _Long(aux),
    )


def _context_log(context: int) -> str:
    """Messages of a file system context, one read each; ENODATA ends them."""
    lines: list[str] = []
    os.set_blocking(context, False)
    while True:
        try:
            lines.append(os.read(context, 1024).decode(errors="replace").strip())
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EAGAIN, errno.EINVAL):
                raise
            return "; ".join(lines)


def set_mount_attributes(
    fd: int, *, add: int = 0, remove: int = 0, propagation: int = 0, userns_fd: int = 0, recursive: bool = False
) -> None:
    """mount_setattr(2) on the mount `fd`."""
    packed = struct.pack("4Q", add, remove, propagation, userns_fd)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    _call("mount_setattr", _MOUNT_SETATTR, _Long(fd), _Bytes(b""), _Long(flags), packed, _Long(len(packed)))


def bind(source: Path, target: Path) -> None:
    if _libc.mount(_Bytes(os.fsencode(source)), _Bytes(os.fsencode(target)), None, ctypes.c_ulong(MS_BIND), None):
        raise oserror(f"bind {source} {target}")


def unmount(path: Path, *, detach: bool = False) -> None:
    if _libc.umount2(_Bytes(os.fsencode(path)), ctypes.c_int(MNT_DETACH if detach else 0)):
        raise oserror(f"umount {path}")


class _Statfs(ctypes.Structure):
    # The kernel fills in 120 bytes; the rest is room in case a libc's struct is larger.
    _fields_ = [("type", ctypes.c_long), ("rest", ctypes.c_char * 248)]


def filesystem_magic(at: str | Path | int) -> int:
    """The `f_type` of statfs(2), of a path or a descriptor."""
    result = _Statfs()
    if isinstance(at, int):
        failed = _libc.fstatfs(at, ctypes.byref(result))
    else:
        failed = _libc.statfs(_Bytes(os.fsencode(at)), ctypes.byref(result))
    if failed:
        raise oserror(f"statfs {at}")
    return int(result.type) & 0xFFFFFFFF
