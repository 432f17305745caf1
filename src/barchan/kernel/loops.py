"""Loop devices: attach a file with LOOP_CONFIGURE in one step, find the device of a file.

Devices are made with autoclear: the kernel detaches one when its last user (a mount, an open descriptor) is
gone, so that a killed process leaves none behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from barchan.errors import FeatureMissing

_CTL_GET_FREE = 0x4C82
_GET_STATUS64 = 0x4C05
_CONFIGURE = 0x4C0A
_READ_ONLY, _AUTOCLEAR, _DIRECT_IO = 1, 4, 16
_INFO = struct.Struct("=5Q4I64s64s32s2Q")
_CONFIG_SIZE = 8 + _INFO.size + 64
_TRIES = 64


@contextmanager
def attached(path: Path, *, read_only: bool = False, direct_io: bool = False) -> Iterator[str]:
    """Name of a loop device over `path`, the existing one if there is one; it lives on while it is mounted.

    Two devices over one file would be two file systems with the same blocks, so an existing one is always used.
    """
    found = find(path)
    device, fd = (found, os.open(found, os.O_RDONLY | os.O_CLOEXEC)) if found else _attach(path, read_only, direct_io)
    try:
        yield device
    finally:
        os.close(fd)


def _attach(path: Path, read_only: bool, direct_io: bool) -> tuple[str, int]:
    backing = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
    try:
        flags = _AUTOCLEAR | (_READ_ONLY if read_only else 0) | (_DIRECT_IO if direct_io else 0)
        return _configure_free(backing, _config(backing, flags, os.fsencode(path)))
    finally:
        os.close(backing)


def _config(backing: int, flags: int, name: bytes) -> bytes:
    info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, name[:63], b"", b"", 0, 0)
    return (struct.pack("=2I", backing, 0) + info).ljust(_CONFIG_SIZE, b"\0")


def _configure_free(backing: int, config: bytes) -> tuple[str, int]:
    for _ in range(_TRIES):
        device = f"/dev/loop{_free_number()}"
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _CONFIGURE, bytearray(config))
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EBUSY:
                raise
            continue
        return device, fd
    raise OSError(errno.EBUSY, "no free loop device: others took each one first")


def _free_number() -> int:
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise FeatureMissing("no loop devices: /dev/loop-control", hint="load the kernel module `loop`") from error
    try:
        return fcntl.ioctl(control, _CTL_GET_FREE)
    finally:
        os.close(control)


def find(path: Path) -> str | None:
    """The loop device whose backing file is this very inode."""
    try:
        wanted = path.stat()
    except FileNotFoundError:
        return None
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        device = f"/dev/{entry.parts[3]}"
        if _backing(device) == (wanted.st_dev, wanted.st_ino):
            return device
    return None


def _backing(device: str) -> tuple[int, int] | None:
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        info = bytearray(_INFO.size)
        fcntl.ioctl(fd, _GET_STATUS64, info)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None
    finally:
        os.close(fd)
    kernel_dev, inode = _INFO.unpack(info)[:2]
    return _userspace_dev(kernel_dev), inode


def _userspace_dev(number: int) -> int:
    """`lo_device` comes in the kernel's huge_encode_dev form, which is st_dev's encoding up to 32 bits."""
    return os.makedev((number >> 8) & 0xFFF, (number & 0xFF) | ((number >> 12) & 0xFFF00))
