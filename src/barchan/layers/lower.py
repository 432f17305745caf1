"""What a changeset asks of the layers below it, and a record of the answers.

A layer of an image is meant to be applied on those below it: a parent directory, a link on the way or the target of a
hard link may be only there. The answers are facts about the stack, and a conversion is right on every stack that gives
the same ones. The layers are looked at as they are, without a mount of overlayfs, by its rules.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from barchan.errors import CreateFailed
from barchan.layers import content
from barchan.layers.attach import attach
from barchan.layers.content import DATA, IMAGE

Parts = tuple[bytes, ...]
"""A path below the root, without '.', '..' and links on the way."""
OPAQUE = "trusted.overlay.opaque"
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY = 1 << 20


class Attributes(msgspec.Struct, frozen=True):
    """Of a file. `mode` is without the type."""

    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: dict[str, bytes] = {}


class Seen(msgspec.Struct, frozen=True):
    """What lies at a path. `target` is of a link."""

    kind: Literal["absent", "directory", "link", "other"] = "absent"
    target: bytes = b""


class Fact(msgspec.Struct, frozen=True):
    """One question about a path and what the answer was."""

    question: Literal["look", "attributes", "content"]
    path: bytes
    answer: str


class Lower:
    """The merged layers of a stack, read only. `roots` opens their root directories, top first, at the first question."""

    def __init__(self, roots: Callable[[], Sequence[int]]) -> None:
        self._open = roots
        self._linked: dict[int, dict[int, list[Parts]]] = {}
        self.facts: dict[tuple[str, Parts], Fact] = {}

    @functools.cached_property
    def _roots(self) -> Sequence[int]:
        return self._open()

    @property
    def roots(self) -> Sequence[int]:
        """The root directories of the layers, top first, open as long as they are mounted."""
        return self._roots

    def gives(self, facts: Sequence[Fact]) -> bool:
        """Whether every question would be answered the same way here."""
        return all(self._ask(fact.question, _split(fact.path)) == fact.answer for fact in facts)

    def look(self, path: Parts) -> Seen:
        self._note("look", path)
        return self._look(path)

    def attributes(self, path: Parts) -> Attributes:
        """Of a directory; the default when there is none."""
        self._note("attributes", path)
        return self._attributes(path)

    def group(self, path: Parts) -> tuple[Parts, ...]:
        """Every visible name of the file at `path`, itself first."""
        self._note("content", path)
        return self._group(path)

    def _note(self, question: Literal["look", "attributes", "content"], path: Parts) -> None:
        if (question, path) not in self.facts:
            self.facts[question, path] = Fact(question, b"/".join(path), self._ask(question, path))

    def _ask(self, question: str, path: Parts) -> str:
        if question == "look":
            seen = self._look(path)
            return f"{seen.kind}:{seen.target.hex()}"
        if question == "attributes":
            return hashlib.sha256(_encoded(self._attributes(path))).hexdigest()
        return self._content(path)

    def _look(self, path: Parts) -> Seen:
        found = self._find(path)
        if found is None:
            return Seen()
        index, state = found
        if stat.S_ISLNK(state.st_mode):
            with self._parent(index, path) as fd:
                return Seen("link", os.readlink(path[-1], dir_fd=fd))
        return Seen("directory" if stat.S_ISDIR(state.st_mode) else "other")

    def _attributes(self, path: Parts) -> Attributes:
        found = self._find(path)
        if found is None or not stat.S_ISDIR(found[1].st_mode):
            return Attributes()
        return self._attributes_at(found[0], path, found[1])

    def _attributes_at(self, index: int, path: Parts, state: os.stat_result) -> Attributes:
        with self._parent(index, path) as fd:
            place = b"/proc/self/fd/%d/" % fd + (path[-1] if path else b".")
            xattrs = {
                name: os.getxattr(place, name, follow_symlinks=False)
                for name in sorted(os.listxattr(place, follow_symlinks=False))
                if name != OPAQUE
            }
        return Attributes(stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid, state.st_mtime_ns, xattrs)

    def _content(self, path: Parts) -> str:
        found = self._find(path)
        if found is None or stat.S_ISDIR(found[1].st_mode):
            return ""
        digest = hashlib.sha256(_encoded((self._group(path), self._attributes_at(found[0], path, found[1]))))
        if stat.S_ISREG(found[1].st_mode):
            with self._parent(found[0], path) as fd, _file(path[-1], fd) as file:
                while piece := os.read(file, _COPY):
                    digest.update(piece)
        return digest.hexdigest()

    def _group(self, path: Parts) -> tuple[Parts, ...]:
        found = self._find(path)
        if found is None or found[1].st_nlink == 1:
            return (path,)
        index, inode = found[0], found[1].st_ino
        if index not in self._linked:
            self._linked[index] = _linked(self._roots[index])
        names = self._linked[index].get(inode, ())
        return (path, *(name for name in names if name != path and self._shows(name, index, inode)))

    def _shows(self, name: Parts, index: int, inode: int) -> bool:
        found = self._find(name)
        return found is not None and (found[0], found[1].st_ino) == (index, inode)

    def copy(self, path: Parts, name: bytes, directory: int) -> None:
        """Make `name` in `directory` what the file at `path` is, its attributes included. `FileNotFoundError`."""
        found = self._find(path)
        if found is None or stat.S_ISDIR(found[1].st_mode):
            raise FileNotFoundError(errno.ENOENT, "no such file below")
        index, state = found
        with self._parent(index, path) as fd:
            _recreate(path[-1], fd, state, name, directory)
        set_attributes(name, directory, self._attributes_at(index, path, state), link=stat.S_ISLNK(state.st_mode))

    def size(self, path: Parts) -> int:
        found = self._find(path)
        return found[1].st_size if found else 0

    # --- questions that no record is kept of

    def find(self, path: Parts) -> tuple[int, os.stat_result] | None:
        """What is visible at `path`, and the index of its layer."""
        return self._find(path)

    def attributes_of(self, path: Parts, found: tuple[int, os.stat_result]) -> Attributes:
        """Of what `find` found there."""
        return self._attributes_at(found[0], path, found[1])

    def names(self, path: Parts) -> list[bytes]:
        """What is visible in the directory at `path`, sorted; nothing when there is none."""
        seen: dict[bytes, bool] = {}
        for root in self._roots:
            state, more = _search(root, path)
            if state is not None:
                if not stat.S_ISDIR(state.st_mode):
                    break
                opaque = _list(root, path, seen)
                more = more and not opaque
            if not more:
                break
        return sorted(name for name, visible in seen.items() if visible)

    @contextmanager
    def opened(self, path: Parts, index: int) -> Iterator[int]:
        """The directory that holds `path` in one layer."""
        with self._parent(index, path) as fd:
            yield fd

    def _find(self, path: Parts) -> tuple[int, os.stat_result] | None:
        """The index of the topmost layer that shows `path`, and what it is there."""
        for index, root in enumerate(self._roots):
            state, more = _search(root, path)
            if state is not None:
                return index, state
            if not more:
                return None
        return None

    @contextmanager
    def _parent(self, index: int, path: Parts) -> Iterator[int]:
        fd = open_directory(self._roots[index], path[:-1])
        try:
            yield fd
        finally:
            os.close(fd)


def _search(root: int, path: Parts) -> tuple[os.stat_result | None, bool]:
    """What one layer has at `path`; without anything, whether the layers below it are still to be asked."""
    fd, more = os.dup(root), True
    try:
        for part in path[:-1]:
            state = state_of(part, fd)
            if state is None:
                return None, more
            if not stat.S_ISDIR(state.st_mode):
                return None, False
            fd = _replaced(fd, os.open(part, DIRECTORY, dir_fd=fd))
            more = more and not is_opaque(fd)
        state = state_of(path[-1], fd) if path else os.fstat(fd)
    finally:
        os.close(fd)
    return (None, False) if state is not None and is_whiteout(state) else (state, more)


def _list(root: int, path: Parts, seen: dict[bytes, bool]) -> bool:
    """Add the names of one layer that no upper one had, and whether they are files; whether the directory is opaque."""
    fd = open_directory(root, path)
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                seen.setdefault(os.fsencode(entry.name), not whited_out(entry))
        return is_opaque(fd)
    finally:
        os.close(fd)


def whited_out(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False) or entry.is_symlink():
        return False
    return is_whiteout(entry.stat(follow_symlinks=False))


def _replaced(old: int, new: int) -> int:
    os.close(old)
    return new


def state_of(name: bytes, fd: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_whiteout(state: os.stat_result) -> bool:
    return stat.S_ISCHR(state.st_mode) and state.st_rdev == 0


def is_opaque(fd: int) -> bool:
    with suppress(OSError):
        return os.getxattr(fd, OPAQUE) == b"y"
    return False


def _linked(root: int) -> dict[int, list[Parts]]:
    """The names of every file of a layer that has several, by inode."""
    found: dict[int, list[Parts]] = {}
    todo: list[Parts] = [()]
    while todo:
        path = todo.pop()
        fd = open_directory(root, path)
        try:
            for name in sorted(os.listdir(fd)):
                raw = os.fsencode(name)
                state = os.stat(raw, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(state.st_mode):
                    todo.append((*path, raw))
                elif state.st_nlink > 1:
                    found.setdefault(state.st_ino, []).append((*path, raw))
        finally:
            os.close(fd)
    return found


def _recreate(source: bytes, source_fd: int, state: os.stat_result, name: bytes, directory: int) -> None:
    if stat.S_ISLNK(state.st_mode):
        os.symlink(os.readlink(source, dir_fd=source_fd), name, dir_fd=directory)
    elif not stat.S_ISREG(state.st_mode):
        os.mkfifo(name, 0o600, dir_fd=directory)
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        out = os.open(name, flags, 0o600, dir_fd=directory)
        with os.fdopen(out, "wb") as file, _file(source, source_fd) as content:
            while piece := os.read(content, _COPY):
                file.write(piece)


@contextmanager
def _file(name: bytes, directory: int) -> Iterator[int]:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


def open_directory(root: int, path: Parts) -> int:
    """A directory below `root`, reached without following any link."""
    fd = os.dup(root)
    try:
        for part in path:
            fd = _replaced(fd, os.open(part, DIRECTORY, dir_fd=fd))
    except OSError:
        os.close(fd)
        raise
    return fd


def set_attributes(name: bytes, directory: int, wanted: Attributes, *, link: bool = False) -> None:
    """In the one order that loses nothing: a change of owner clears set-user-id and capabilities."""
    os.chown(name, wanted.uid, wanted.gid, dir_fd=directory, follow_symlinks=False)
    if not link:
        os.chmod(name, wanted.mode, dir_fd=directory)
    place = b"/proc/self/fd/%d/" % directory + name
    for key, value in wanted.xattrs.items():
        os.setxattr(place, key, value, follow_symlinks=False)
    os.utime(name, ns=(wanted.mtime_ns, wanted.mtime_ns), dir_fd=directory, follow_symlinks=False)


def _encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value, order="deterministic")


def _split(path: bytes) -> Parts:
    return tuple(path.split(b"/")) if path else ()


@contextmanager
def mounted(layers: Sequence[Path]) -> Iterator[Lower]:
    """A stack of layers by their directories, top first, mounted where nobody else sees them if a question is asked."""
    with ExitStack() as stack:

        def roots() -> list[int]:
            found = []
            for layer in layers:
                found.append(_root(layer))
                stack.callback(os.close, found[-1])
            return found

        yield Lower(roots)


def _root(layer: Path) -> int:
    """The root directory of a new mount, which lasts as long as the descriptor."""
    try:
        data = layer / DATA if content.read(layer).data else None
        fd = attach(layer / IMAGE, data)
    except FileNotFoundError as error:
        raise CreateFailed(f"{layer.name} was removed meanwhile", hint="import again", phase="convert") from error
    try:
        return os.open(".", DIRECTORY, dir_fd=fd)
    finally:
        os.close(fd)
