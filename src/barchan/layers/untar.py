"""Unpack a tar stream below a directory and nowhere else.

A tar is a stranger's program for writing files. Every member is placed relative to descriptors opened without following
links; absolute names, `..`, members that pass through a link, hard links to outside, devices, and attributes that steer
overlayfs are refused by name.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from barchan.errors import InvalidRequest
from barchan.layers.tarwalk import MOST_DEPTH, Budget, Tar, attributes_of, opened, time_of
from barchan.spec import MIB

_SPARE = 64 * MIB
_ALLOWED_XATTRS = ("user.", "security.capability", "system.posix_acl_")
_PARENT = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(archive: Path, root: Path, shown: str = "") -> None:
    """Unpack the uncompressed tar `archive` into the empty directory `root`, owners and modes included.

    Raises `InvalidRequest` naming the member, `NodeStorageFull` when it does not fit.
    """
    os.chmod(root, 0o755)
    budget = Budget(shutil.disk_usage(root).free - _SPARE, "unpack")
    with opened(archive, shown or archive.name, "unpack") as tar, _Target(root, tar, budget) as target:
        for member in tar.members():
            target.place(member)
        target.finish()


class _Target:
    """A directory being filled. The parent of the last member stays open: most members share it with the next."""

    def __init__(self, root: Path, tar: Tar, budget: Budget) -> None:
        self._stack = ExitStack()
        self._root = os.open(root, _PARENT)
        self._stack.callback(os.close, self._root)
        self._tar, self._budget = tar, budget
        self._parent: tuple[tuple[str, ...], int] = ((), self._root)
        self._directories: dict[tuple[str, ...], tarfile.TarInfo] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()
        self._stack.close()

    def place(self, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name, member.name)
        self._budget.take(member.name, member.size if member.isreg() else 0)
        if not parts:
            return self._remember((), member)
        *above, name = parts
        parent = self._open(tuple(above), member.name)
        if member.isdir():
            return self._directory(parent, parts, member)
        _clear(parent, name, member.name)
        if member.isreg():
            self._file(parent, name, member)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            _own(parent, name, member)
        elif member.islnk():
            self._link(parent, name, member)
        else:
            _special(parent, name, member)

    def _open(self, parts: tuple[str, ...], shown: str) -> int:
        if parts == self._parent[0]:
            return self._parent[1]
        fd = os.dup(self._root)
        for part in parts:
            try:
                fd = _descend(fd, part)
            except OSError as error:
                raise _refuse(shown, f"passes through {part!r}, which is not a directory") from error
        self._forget()
        self._parent = (parts, fd)
        return fd

    def _forget(self) -> None:
        if self._parent[1] != self._root:
            os.close(self._parent[1])
        self._parent = ((), self._root)

    def _directory(self, parent: int, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        try:
            os.mkdir(parts[-1], 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode):
                raise _refuse(member.name, "replaces a file by a directory") from None
        self._remember(parts, member)

    def _remember(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        """Modes and times of directories come last: writing into one changes its time."""
        self._directories[parts] = member

    def _file(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as out:
            self._tar.copy(member, out.fileno())
            _own(parent, name, member)
            os.fchmod(out.fileno(), stat.S_IMODE(member.mode))
            _attributes(out.fileno(), member)
            out.flush()
            os.utime(out.fileno(), ns=_times(member))

    def _link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        *above, last = _parts(member.linkname, member.name) or ("",)
        fd = os.dup(self._root)
        try:
            for part in above:
                fd = _descend(fd, part, make=False)
            os.link(last, name, src_dir_fd=fd, dst_dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            raise _refuse(member.name, f"is a hard link to {member.linkname!r}, which is not in the tar") from error
        finally:
            os.close(fd)

    def finish(self) -> None:
        for parts in sorted(self._directories, key=len, reverse=True):
            member = self._directories[parts]
            fd = self._open(parts, member.name)
            os.fchown(fd, member.uid, member.gid)
            os.fchmod(fd, stat.S_IMODE(member.mode))
            _attributes(fd, member)
            os.utime(fd, ns=_times(member))


def _descend(fd: int, part: str, *, make: bool = True) -> int:
    """The child directory; `fd` is closed when that succeeds."""
    try:
        child = os.open(part, _PARENT, dir_fd=fd)
    except FileNotFoundError:
        if not make:
            raise
        os.mkdir(part, 0o755, dir_fd=fd)
        child = os.open(part, _PARENT, dir_fd=fd)
        os.fchmod(child, 0o755)
    os.close(fd)
    return child


def _parts(name: str, shown: str) -> tuple[str, ...]:
    if name.startswith("/") or "\0" in name:
        raise _refuse(shown, "has an absolute name")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if len(parts) > MOST_DEPTH:
        raise _refuse(shown, f"lies more than {MOST_DEPTH} directories deep")
    if ".." in parts:
        raise _refuse(shown, "has '..' in its name")
    if any(part.startswith(".wh.") for part in parts):
        raise _refuse(shown, "is a whiteout of an image layer; import plain trees")
    return parts


def _clear(parent: int, name: str, shown: str) -> None:
    """A later member of the same name replaces an earlier one."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        raise _refuse(shown, "replaces a directory by a file") from None


def _special(parent: int, name: str, member: tarfile.TarInfo) -> None:
    if not member.isfifo():
        raise _refuse(member.name, "is a device, which no layer may hold")
    os.mkfifo(name, 0o600, dir_fd=parent)
    _own(parent, name, member)
    os.chmod(name, stat.S_IMODE(member.mode), dir_fd=parent)


def _own(parent: int, name: str, member: tarfile.TarInfo) -> None:
    os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
    os.utime(name, ns=_times(member), dir_fd=parent, follow_symlinks=False)


def _attributes(fd: int, member: tarfile.TarInfo) -> None:
    for name, value in attributes_of(member).items():
        if not name.startswith(_ALLOWED_XATTRS):
            raise _refuse(member.name, f"has the attribute {name!r}, which a layer may not carry")
        os.setxattr(fd, name, value)


def _times(member: tarfile.TarInfo) -> tuple[int, int]:
    try:
        moment = time_of(member)
    except ValueError as error:
        raise _refuse(member.name, f"has a modification time that {error}") from error
    return moment, moment


def _refuse(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"tar member {name!r} {reason}", field="source", phase="unpack")
