"""What is mounted in this mount namespace, and mounts that do not propagate out of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from barchan.kernel import syscalls

_ESCAPE = re.compile(r"\\([0-7]{3})")


class MountPoint(msgspec.Struct, frozen=True):
    """One line of /proc/self/mountinfo."""

    path: str
    fstype: str
    source: str
    device: str
    """major:minor of the superblock, as st_dev."""
    options: frozenset[str]
    """Of the superblock."""
    shared: bool
    """Mounts below it show up in other mount namespaces."""


def parse(text: str) -> tuple[MountPoint, ...]:
    """Mount points in the order of mounting; a later one hides an earlier one at the same path."""
    return tuple(_line(line) for line in text.splitlines() if line)


def _line(line: str) -> MountPoint:
    left, _, right = line.partition(" - ")
    head, tail = left.split(" "), right.split(" ")
    return MountPoint(
        path=_plain(head[4]),
        fstype=tail[0],
        source=_plain(tail[1]),
        device=head[2],
        options=frozenset(tail[2].split(",")) if len(tail) > 2 else frozenset(),
        shared=any(tag.startswith("shared:") for tag in head[6:]),
    )


def _plain(text: str) -> str:
    """The kernel escapes space, tab, newline and backslash as octal numbers."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def current() -> tuple[MountPoint, ...]:
    return parse(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))


def top(path: Path, mounts: Iterable[MountPoint] | None = None) -> MountPoint | None:
    """The visible mount exactly at `path`, if there is one."""
    wanted = os.path.realpath(path)
    found = [m for m in (current() if mounts is None else mounts) if m.path == wanted]
    return found[-1] if found else None


def make_private(path: Path) -> None:
    """Make the directory `path` a mount of its own whose children stay in this namespace. Idempotent.

    Otherwise every service with a mount namespace of its own would hold a copy of each layer and of the
    scratch volume, and could not let go of them.
    """
    here = top(path)
    if here is None:
        syscalls.bind(path, path)
    elif not here.shared:
        return
    fd = syscalls.open_tree(path)
    try:
        syscalls.set_mount_attributes(fd, propagation=syscalls.PRIVATE)
    finally:
        os.close(fd)
