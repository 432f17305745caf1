"""Everything about a tree that a program could see, to compare two of them."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from pathlib import Path
from typing import Any

Described = dict[bytes, tuple[Any, ...]]


def describe(root: Path, since: float) -> Described:
    """By relative name. Times between `since` (Unix seconds) and now are those of the unpacking itself and left out."""
    now = time.time()
    top = os.path.join(os.fsencode(root), b".")
    found: dict[bytes, os.stat_result] = {b".": os.stat(top)}
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            found[os.path.relpath(path, top)] = os.lstat(path)
    groups: dict[tuple[int, int], list[bytes]] = {}
    for name, at in sorted(found.items()):
        if not stat.S_ISDIR(at.st_mode):
            groups.setdefault((at.st_dev, at.st_ino), []).append(name)
    return {
        name: _entry(top, name, at, groups.get((at.st_dev, at.st_ino), []), (since, now)) for name, at in found.items()
    }


def _entry(
    top: bytes, name: bytes, at: os.stat_result, group: list[bytes], left_out: tuple[float, float]
) -> tuple[Any, ...]:
    path = os.path.join(top, name)
    content: Any = None
    if stat.S_ISREG(at.st_mode):
        content = (at.st_size, hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).hexdigest())
    elif stat.S_ISLNK(at.st_mode):
        content = os.readlink(path)
    elif stat.S_ISCHR(at.st_mode) or stat.S_ISBLK(at.st_mode):
        content = at.st_rdev
    xattrs = {
        key: os.getxattr(path, key, follow_symlinks=False)
        for key in sorted(os.listxattr(path, follow_symlinks=False))
        if key != "security.selinux"
    }
    moment = None if left_out[0] <= at.st_mtime <= left_out[1] else at.st_mtime_ns
    return oct(at.st_mode), at.st_uid, at.st_gid, moment, content, xattrs, tuple(group)


def differences(ours: Described, theirs: Described) -> list[str]:
    """One line each; a time that either side left out does not count."""
    lines = []
    for name in sorted(ours.keys() | theirs.keys()):
        one, two = ours.get(name), theirs.get(name)
        if one and two and (one[3] is None or two[3] is None):
            one, two = (*one[:3], *one[4:]), (*two[:3], *two[4:])
        if one != two:
            lines.append(f"{name!r}: ours {ours.get(name)}, theirs {theirs.get(name)}")
    return lines
