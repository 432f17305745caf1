"""A layer's files become a mount: directly, or over loop devices where kernel or file system know no other way.

Kernels from 6.12 on mount an EROFS image from its file, on file systems whose files have a page cache of the usual kind; tmpfs
and overlayfs have not.
"""

from __future__ import annotations

import errno
import logging
from contextlib import ExitStack
from pathlib import Path

from barchan.kernel import loops, sharing, syscalls

logger = logging.getLogger(__name__)
_ATTRIBUTES = syscalls.ATTR_RDONLY | syscalls.ATTR_NODEV | syscalls.ATTR_NOSUID
_told: set[int] = set()
"""File systems of which it was said that they need loop devices."""


def attach(image: Path, data: Path | None, *, reduced: bool = False) -> int:
    """A detached mount; the caller closes it. `reduced`: do not even try without loop devices. Raises `OSError`."""
    if not reduced:
        try:
            return _mount(str(image), None if data is None else str(data))
        except OSError as error:
            if error.errno != errno.ENOTBLK:
                raise
        _tell(image)
    with ExitStack() as attached:
        devices = [
            attached.enter_context(loops.attached(path, read_only=True)) for path in (image, data) if path is not None
        ]
        return _mount(devices[0], devices[1] if data is not None else None)


def _mount(image: str, data: str | None) -> int:
    options: list[syscalls.Option] = [("source", image), ("ro", None), *sharing.options()]
    if data is not None:
        options.append(("device", data))
    return syscalls.new_mount("erofs", options, _ATTRIBUTES)


def _tell(image: Path) -> None:
    device = image.stat().st_dev
    if device not in _told:
        _told.add(device)
        logger.warning("layers at %s need loop devices: its file system or the kernel knows no mounts of files", image)
