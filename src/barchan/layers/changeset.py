"""One layer of an OCI image, from its tar to the tree that overlayfs lays over the layers below.

Whiteouts become character devices 0/0, opaque directories carry `trusted.overlay.opaque`. What a tar leaves to be found
below it (parents, links on the way, targets of hard links) is looked up in `Lower` and copied up. The result, laid over
the layers below, is the tree that unpacking all tars into one directory gives, with these exceptions, all refused by name:
`..` in a name, devices, attributes that steer overlayfs, and what `.wh.` cannot mean.

Links that the image brings are resolved here, by hand, inside its own root; the host follows none. Files are made
relative to descriptors that were reached without following links.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from barchan.layers.lower import (
    DIRECTORY,
    OPAQUE,
    Attributes,
    Lower,
    Parts,
    Seen,
    is_whiteout,
    open_directory,
    set_attributes,
)
from barchan.layers.member import OPAQUE_FILE, WHITEOUT, attributes, parts_of, refused, time_ns
from barchan.layers.tarwalk import MOST_DEPTH, Budget, Tar

_LINKS = 255
"""Links followed on the way to one member, as in filepath-securejoin, which umoci uses."""
_SPARE = 64 << 20


@dataclass(slots=True)
class _Node:
    """A directory of the layer. Its attributes are set last: writing into it changes its time."""

    attributes: Attributes
    children: dict[bytes, _Node] = field(default_factory=dict)
    opaque: bool = False
    brought: bool = False
    """By a member: itself, or something in it. If not, it is here for a whiteout or for `copied`, and counts as below."""
    copied: set[bytes] = field(default_factory=set)
    """Files in it that no member brought: other names of what a hard link was made to."""


def apply(archive: Path, root: Path, lower: Lower, shown: str) -> bool:
    """Fill the empty directory `root` with what the uncompressed tar `archive` changes on top of `lower`.

    True: it hides everything below, which overlayfs does not do for a root; the layers below are to be left out.
    Raises `InvalidRequest` naming the member, in the phase `convert`; `NodeStorageFull`.
    """
    budget = Budget(shutil.disk_usage(root).free - _SPARE, "convert")
    with archive.open("rb") as file:
        tar = Tar(file, shown, "convert")
        with _Changeset(root, lower, tar, budget) as changes:
            for member in tar.members():
                changes.place(member)
            return changes.finish()


class _Changeset:
    def __init__(self, root: Path, lower: Lower, tar: Tar, budget: Budget) -> None:
        self._fd = os.open(root, DIRECTORY)
        self._lower, self._tar, self._budget = lower, tar, budget
        self._top = _Node(Attributes())
        self._inherits = True
        self._cached: tuple[Parts, Parts, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()
        os.close(self._fd)

    # --- members

    def place(self, member: tarfile.TarInfo) -> None:
        try:
            self._place(member)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise refused(member, f"cannot be made: {error.strerror}") from error

    def _place(self, member: tarfile.TarInfo) -> None:
        parts = parts_of(member.name, member)
        self._budget.take(member.name, member.size if member.isreg() else 0)
        if not parts:
            if not member.isdir():
                raise refused(member, "would make the root something else than a directory")
            self._top.attributes, self._inherits = attributes(member), False
        elif parts[-1].startswith(WHITEOUT):
            self._whiteout(parts, member)
        elif member.isdir():
            self._directory(parts, member)
        else:
            self._file(parts, member)

    def _directory(self, parts: Parts, member: tarfile.TarInfo) -> None:
        wanted = attributes(member)
        real, fd = self._parent(parts[:-1], member)
        node = self._node(real)
        known = node.children.get(parts[-1]) or self._make(node, fd, parts[-1], wanted)
        known.attributes, known.brought = wanted, True

    def _make(self, parent: _Node, fd: int, name: bytes, attributes: Attributes) -> _Node:
        """A new directory. In place of something, it hides what lies below that."""
        opaque = self._unlink(parent, fd, name)
        os.mkdir(name, 0o700, dir_fd=fd)
        made = parent.children[name] = _Node(attributes, opaque=opaque)
        return made

    def _unlink(self, parent: _Node, fd: int, name: bytes) -> bool:
        parent.copied.discard(name)
        try:
            os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            return False
        return True

    def _file(self, parts: Parts, member: tarfile.TarInfo) -> None:
        name = parts[-1]
        real, fd = self._parent(parts[:-1], member)
        if self._node(real).children.pop(name, None):
            shutil.rmtree(name, dir_fd=fd)
        self._unlink(self._node(real), fd, name)
        if member.islnk():
            self._hard_link(real, fd, name, member)
        elif member.isreg():
            self._regular(fd, name, member)
        else:
            self._special(fd, name, member)

    def _regular(self, fd: int, name: bytes, member: tarfile.TarInfo) -> None:
        wanted = attributes(member)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=fd), "wb") as out:
            self._tar.copy(member, out.fileno())
        set_attributes(name, fd, wanted)

    def _special(self, fd: int, name: bytes, member: tarfile.TarInfo) -> None:
        wanted = attributes(member)
        if member.issym():
            os.symlink(member.linkname.encode("utf-8", "surrogateescape"), name, dir_fd=fd)
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=fd)
        elif member.isdev():
            raise refused(member, "is a device, which no layer may hold")
        else:
            raise refused(member, f"is of the unknown type {member.type!r}")
        set_attributes(name, fd, wanted, link=member.issym())

    def _hard_link(self, real: Parts, fd: int, name: bytes, member: tarfile.TarInfo) -> None:
        """To what the name means now: in this layer, or below it and then copied up with all its names."""
        target = parts_of(member.linkname, member)
        above = self._reach(target[:-1], member)
        path, new = (*above, *target[-1:]), (*real, name)
        if path[: len(new)] == new or self._look(path).kind not in ("link", "other"):
            raise refused(member, f"is a hard link to {member.linkname!r}, which is no file of the image")
        if self._staged(path) is None:
            self._copy_up(path, new, member)
        source = open_directory(self._fd, above)
        try:
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False)
        finally:
            os.close(source)

    def _copy_up(self, path: Parts, new: Parts, member: tarfile.TarInfo) -> None:
        """With every name that the file has; what is at `new` or below it is about to be replaced."""
        self._budget.take(member.name, self._lower.size(path))
        first, *others = self._lower.group(path)
        with self._opened(first[:-1], member) as directory:
            self._lower.copy(first, first[-1], directory)
            self._node(first[:-1]).copied.add(first[-1])
            for other in others:
                if other[: len(new)] == new or self._staged(other) or self._look(other).kind == "absent":
                    continue
                with self._opened(other[:-1], member) as beside:
                    os.link(first[-1], other[-1], src_dir_fd=directory, dst_dir_fd=beside, follow_symlinks=False)
                self._node(other[:-1]).copied.add(other[-1])

    def _whiteout(self, parts: Parts, member: tarfile.TarInfo) -> None:
        """It hides what lies below this layer, never what this layer brings, wherever in the tar that comes."""
        real = self._resolve(parts[:-1], member)
        if isinstance(real, bytes):
            return  # below a file there is nothing to hide
        if parts[-1] == OPAQUE_FILE:
            return self._make_opaque(real, member)
        name = parts[-1].removeprefix(WHITEOUT)
        if name in (b"", b".", b"..") or name.startswith(WHITEOUT):
            raise refused(member, "is no whiteout of anything")
        path = (*real, name)
        if self._known(real) is not None:
            self._drop(real, (name,))
        if (node := self._known(path)) is not None:
            node.opaque = True
            self._drop_copied(path)
        elif self._staged(path) is None and self._look(path).kind != "absent":
            with self._opened(real, member) as fd:
                os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=fd)
                set_attributes(name, fd, Attributes(0, mtime_ns=time_ns(member)))  # the same layer every time

    def _make_opaque(self, real: Parts, member: tarfile.TarInfo) -> None:
        if real and self._known(real) is None and self._look(real).kind != "directory":
            return
        with self._opened(real, member):
            self._node(real).opaque = True
        self._drop_copied(real)

    def _drop_copied(self, path: Parts) -> None:
        """What no member brought, in a directory and in those below it."""
        node = self._node(path)
        self._drop(path, [*node.copied, *node.children])
        for name in node.children:
            self._drop_copied((*path, name))

    def _drop(self, real: Parts, names: Iterable[bytes]) -> None:
        """Those that no member brought."""
        node, fd = self._node(real), open_directory(self._fd, real)
        try:
            for name in names:
                if name in node.copied:
                    self._unlink(node, fd, name)
                elif name in node.children and not node.children[name].brought:
                    shutil.rmtree(name, dir_fd=fd)
                    del node.children[name]
        finally:
            os.close(fd)

    # --- where things are

    def _parent(self, parts: Parts, member: tarfile.TarInfo) -> tuple[Parts, int]:
        """The directory that `parts` means now, made if it is missing. The last one stays open for the next member.

        It is used again only if no link was on the way: then no other member can give `parts` another meaning.
        """
        if self._cached is None or self._cached[0] != parts or self._cached[1] != parts:
            real = self._reach(parts, member)
            fd = self._open(real, member, brought=True)
            self._forget()
            self._cached = (parts, real, fd)
        return self._cached[1], self._cached[2]

    def _forget(self) -> None:
        if self._cached is not None:
            os.close(self._cached[2])
        self._cached = None

    def _reach(self, parts: Parts, member: tarfile.TarInfo) -> Parts:
        real = self._resolve(parts, member)
        if isinstance(real, bytes):
            raise refused(member, f"passes through {real!r}, which is not a directory")
        return real

    def _resolve(self, parts: Parts, member: tarfile.TarInfo) -> Parts | bytes:
        """`parts` without links, inside the root of the image whatever the links say. What is missing is kept.

        Of a path through something that is neither directory nor link, the name of that.
        """
        todo, at, links = list(reversed(parts)), list[bytes](), 0
        while todo:
            part = todo.pop()
            if part == b"..":
                del at[-1:]
            elif part not in (b"", b"."):
                seen = self._look((*at, part))
                if seen.kind == "other":
                    return part
                if seen.kind != "link":
                    at.append(part)
                    continue
                links += 1
                if links > _LINKS:
                    raise refused(member, f"passes through more than {_LINKS} links")
                todo += reversed(seen.target.split(b"/"))
                at = [] if seen.target.startswith(b"/") else at
        return tuple(at)

    def _look(self, path: Parts) -> Seen:
        """What lies at a path without links on the way: of this layer, else of those below."""
        if self._known(path) is not None:
            return Seen("directory")
        state = self._staged(path)
        if state is not None:
            if is_whiteout(state):
                return Seen()
            if stat.S_ISLNK(state.st_mode):
                return Seen("link", os.readlink(b"/".join(path), dir_fd=self._fd))
            return Seen("other")
        return Seen() if self._hidden(path) else self._lower.look(path)

    def _staged(self, path: Parts) -> os.stat_result | None:
        """Of this layer only. None above `path` is a link: directories of this layer are its own."""
        if self._known(path[:-1]) is None:
            return None
        try:
            return os.stat(b"/".join(path), dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _known(self, path: Parts) -> _Node | None:
        """The directory of this layer at `path`."""
        node: _Node | None = self._top
        for part in path:
            node = node.children.get(part) if node else None
        return node

    def _node(self, path: Parts) -> _Node:
        node = self._known(path)
        assert node is not None
        return node

    def _hidden(self, path: Parts) -> bool:
        """Whether this layer hides what lies below it at `path`, where it has nothing itself."""
        node = self._top
        for depth, part in enumerate(path, 1):
            if node.opaque:
                return True
            child = node.children.get(part)
            if child is None:
                return depth < len(path) and self._staged(path[:depth]) is not None
            node = child
        return node.opaque

    @contextmanager
    def _opened(self, real: Parts, member: tarfile.TarInfo) -> Iterator[int]:
        fd = self._open(real, member)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open(self, real: Parts, member: tarfile.TarInfo, *, brought: bool = False) -> int:
        """The directory `real`; what this layer lacks of it is copied up from below, or new."""
        if len(real) >= MOST_DEPTH:
            raise refused(member, f"lies more than {MOST_DEPTH} directories deep")
        node, fd = self._top, os.dup(self._fd)
        try:
            for depth, part in enumerate(real):
                child = node.children.get(part)
                if child is None:
                    self._budget.take(member.name, 0)
                    child = self._make(node, fd, part, self._inherited(real[: depth + 1], member))
                child.brought |= brought
                node = child
                new = os.open(part, DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = new
        except OSError:
            os.close(fd)
            raise
        return fd

    def _inherited(self, path: Parts, member: tarfile.TarInfo) -> Attributes:
        if self._look(path).kind == "directory":
            return self._lower.attributes(path)
        return Attributes(mtime_ns=time_ns(member))

    # --- the end

    def finish(self) -> bool:
        """Attributes of directories, the deepest first; whether the root hides everything below."""
        self._forget()
        if self._inherits:
            self._top.attributes = self._lower.attributes(())
        found: list[tuple[Parts, _Node, bool]] = [((), self._top, self._top.opaque)]
        for path, node, hides in found:
            found += (((*path, name), child, hides or child.opaque) for name, child in node.children.items())
        for path, node, hides in reversed(found):
            fd = open_directory(self._fd, path)
            try:
                if hides:
                    _remove_whiteouts(fd)
                if node.opaque and path:
                    os.setxattr(fd, OPAQUE, b"y")
                set_attributes(b".", fd, node.attributes)
            finally:
                os.close(fd)
        return self._top.opaque


def _remove_whiteouts(fd: int) -> None:
    """There is nothing left for them to hide, and overlayfs would list them."""
    with os.scandir(fd) as entries:
        names = [entry.name for entry in entries if is_whiteout(entry.stat(follow_symlinks=False))]
    for name in names:
        os.unlink(name, dir_fd=fd)
