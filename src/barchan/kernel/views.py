"""Read-only views of host directories: what a sandbox may be given of the host's own files.

A view is an overlay without an upper layer, so that nothing in it can be written whatever happens to the mount's flags.
Its inodes are its own: locks, FIFOs and sockets of the directory lead to nothing on the host. Host ids are in no
sandbox's map, so that a sandbox sees the files as nobody's and reads what every user of the host may read. File contents
share the host's page cache. Mounts below the directory are not part of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from barchan.kernel import syscalls

_ATTRIBUTES = syscalls.ATTR_RDONLY | syscalls.ATTR_NOSUID | syscalls.ATTR_NODEV | syscalls.ATTR_NOATIME


def view(directory: Path, nothing: Path, *, noexec: bool = False) -> int:
    """A detached mount; the caller closes it. `nothing` is an empty directory: an overlay wants two. Raises `OSError`."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    top = os.open(directory, flags)
    try:
        below = os.open(nothing, flags)
        try:
            return _overlay(f"/proc/self/fd/{top}:/proc/self/fd/{below}", noexec)
        finally:
            os.close(below)
    finally:
        os.close(top)


def _overlay(layers: str, noexec: bool) -> int:
    # The options are shown inside, in /proc/mounts: a path of the host must not be among them.
    options = (("source", "data"), ("lowerdir", layers), ("redirect_dir", "nofollow"), ("metacopy", "off"))
    return syscalls.new_mount("overlay", options, _ATTRIBUTES | (syscalls.ATTR_NOEXEC if noexec else 0))
