"""The directory that is built from: what COPY and ADD find in it.

Nothing outside it is ever read: a link in a path is followed as long as it stays inside, a link in a tree is copied as a link.
"""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from e2b_dockerfile_utils import PatternMatcher

from barchan.builds.patterns import compiled, is_wild
from barchan.errors import FileFailure, InvalidRequest
from barchan.spec import GIB

MOST_FILES, MOST_BYTES = 1_000_000, 16 * GIB
"""Of one COPY."""
MOST_LINKS = 40
_PIECE = 1 << 20
_KINDS = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l"}
IGNORE_FILE = ".dockerignore"
NOTHING_IGNORED = PatternMatcher([])


class Item(NamedTuple):
    """A file, directory or link of a source. `path` is relative to the source, "" for the source itself."""

    path: str
    local: str
    kind: str
    mode: int
    mtime_ns: int
    content: str
    """SHA-256 of a file's bytes, or what a link says."""


class Source(msgspec.Struct, frozen=True):
    """What one source of a COPY is: a file by its name, or what a directory holds."""

    name: str
    directory: bool
    items: tuple[Item, ...]

    @property
    def document(self) -> tuple[object, ...]:
        """What the cache goes by: names, modes and contents, no times."""
        return (
            "" if self.directory else self.name,
            [(one.path, one.kind, 0 if one.kind == "l" else one.mode, one.content) for one in self.items],
        )


class LocalContext:
    """Raises `InvalidRequest` and `FileFailure`; `OSError` for what cannot be read."""

    def __init__(self, root: Path, ignore: PatternMatcher = NOTHING_IGNORED) -> None:
        self.root = os.path.realpath(root)
        self._ignore = ignore
        self._digests: dict[tuple[str, int, int], str] = {}
        self.skipped: list[str] = []
        """FIFOs, sockets and devices that were left aside."""

    def find(self, source: str, exclude: tuple[str, ...] = ()) -> tuple[Source, ...]:
        """What a source stands for: one, or with wildcards any number. `InvalidRequest` if one without is not there."""
        parts = [part for part in source.split("/") if part not in ("", ".")]
        fixed = next((at for at, part in enumerate(parts) if is_wild(part)), len(parts))
        wild = parts[fixed:]
        if not wild:
            return (self._source(source, self._inside(source, parts), exclude),)
        try:
            base = self._inside(source, parts[:fixed])
            found = sorted(self._matching(base, [compiled(part) for part in wild]))
        except FileNotFoundError:
            return ()
        except ValueError as error:
            raise InvalidRequest(f"{source!r}: {error}", field="source") from error
        paths = [self._inside(path, path.split("/")) for path in found]
        return tuple(self._source(name, path, exclude) for name, path in zip(found, paths, strict=True))

    def _matching(self, base: str, wanted: list[re.Pattern[str]]) -> Iterator[str]:
        """Paths from the root."""
        for name in os.listdir(os.path.join(self.root, base)):
            path = posixpath.join(base, name)
            if not wanted[0].fullmatch(name):
                continue
            if len(wanted) == 1:
                if not self._ignored(path):
                    yield path
            elif os.path.isdir(self._local(path)) and not os.path.islink(self._local(path)):
                yield from self._matching(path, wanted[1:])

    def _local(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def _inside(self, source: str, parts: list[str]) -> str:
        """The same without links, relative to the root."""
        done: list[str] = []
        todo, links = list(reversed(parts)), 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not done:
                    raise InvalidRequest(f"{source!r} leads out of the context", field="source")
                done.pop()
                continue
            local = self._local("/".join([*done, part]))
            if not stat.S_ISLNK(os.lstat(local).st_mode):
                done.append(part)
                continue
            target, links = os.readlink(local), links + 1
            if target.startswith("/") or links > MOST_LINKS:
                why = "is a link that leads out of the context" if target.startswith("/") else "has too many links"
                raise InvalidRequest(f"{source!r} {why}: {target!r}", field="source")
            todo += reversed(target.split("/"))
        return "/".join(done)

    def _source(self, name: str, path: str, exclude: tuple[str, ...]) -> Source:
        leaf = posixpath.basename(name.rstrip("/"))
        if not os.path.isdir(self._local(path)):
            if self._ignored(path):
                raise FileNotFoundError(None, f"excluded by {IGNORE_FILE}", name)
            return Source(leaf, False, (self._item("", path),))
        excluded = PatternMatcher(list(exclude)) if exclude else NOTHING_IGNORED
        size, items = 0, list[Item]()
        for item in self._tree(path, "", excluded):
            size += os.lstat(item.local).st_size if item.kind == "f" else 0
            if len(items) == MOST_FILES or size > MOST_BYTES:
                raise InvalidRequest(
                    f"{name!r} holds more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB",
                    field="source",
                    hint=f"leave out what is not needed: {IGNORE_FILE}",
                )
            items.append(item)
        return Source(leaf, True, tuple(items))

    def _tree(self, top: str, below: str, excluded: PatternMatcher) -> Iterator[Item]:
        """What lies in a directory, each directory before what it holds."""
        for name in sorted(os.listdir(self._local(posixpath.join(top, below)))):
            path = posixpath.join(below, name)
            full = posixpath.join(top, path)
            out = self._ignored(full) or excluded.matches(path)
            kind = _KINDS.get(stat.S_IFMT(os.lstat(self._local(full)).st_mode))
            if kind == "d":
                yield from self._directory(top, path, full, out, excluded)
            elif kind is None:
                self.skipped += [] if out else [full]
            elif not out:
                yield self._item(path, full)

    def _directory(self, top: str, path: str, full: str, out: bool, excluded: PatternMatcher) -> Iterator[Item]:
        if out and not (self._ignore.may_match_under(full) or excluded.may_match_under(path)):
            return
        inside = self._tree(top, path, excluded)
        first = next(inside, None) if out else None
        if not out or first is not None:  # one that is ignored is there for what is not
            yield self._item(path, full)
        if first is not None:
            yield first
        yield from inside

    def _ignored(self, path: str) -> bool:
        return bool(path) and self._ignore.matches(path)

    def _item(self, path: str, full: str) -> Item:
        local = self._local(full)
        found = os.lstat(local)
        kind = _KINDS.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            raise FileFailure(f"{full!r} is no file, directory or link", hint="on this host")
        content = os.readlink(local) if kind == "l" else self._digest(local, found) if kind == "f" else ""
        return Item(path, local, kind, stat.S_IMODE(found.st_mode), found.st_mtime_ns, content)

    def _digest(self, local: str, found: os.stat_result) -> str:
        key = (local, found.st_mtime_ns, found.st_size)
        if key not in self._digests:
            with open_file(local) as file:
                self._digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digests[key]


def open_file(local: str) -> io.FileIO:
    """Never through a link: it was none when it was found."""
    return io.FileIO(local, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK))


def read_ignore(root: Path, dockerfile: Path | None) -> PatternMatcher:
    """What `DOCKERFILE.dockerignore` says, else the context's `.dockerignore`. Raises `InvalidRequest` naming it."""
    beside = [dockerfile.with_name(dockerfile.name + IGNORE_FILE)] if dockerfile is not None else []
    for path in (*beside, root / IGNORE_FILE):
        try:
            text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            return PatternMatcher(text.splitlines())
        except ValueError as error:
            raise InvalidRequest(f"{path.name}: {error}", field="dockerfile") from error
    return NOTHING_IGNORED
