"""Files on their way into a sandbox: what is copied, as items of a tree (see the guest protocol)."""

from __future__ import annotations

import hashlib
import lzma
import os
import posixpath
import tarfile
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

from e2b_dockerfile_utils import PatternMatcher

from barchan.builds.context import Item, Source, open_file
from barchan.errors import FileFailure
from barchan.wire.guest import KEEP, Entry, blob, encode_entry

PIECE = 128 << 10
_BROKEN = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)
DIRECTORY_MODE = 0o755
"""Of directories that COPY makes on its way."""


class Owner(NamedTuple):
    uid: int
    gid: int


ROOT = Owner(0, 0)


class Looks(NamedTuple):
    """What copied files get. `owner` None: as they come; `mode` None: their own."""

    owner: Owner | None = ROOT
    mode: int | None = None

    def of(
        self, path: bytes, kind: str, mode: int, mtime_ns: int, target: bytes = b"", *, owner: Owner = ROOT
    ) -> bytes:
        """An item's head."""
        uid, gid = self.owner or owner
        bits = mode if self.mode is None or kind == "l" else self.mode
        return encode_entry(Entry(path, kind, bits, uid, gid, 1, 0, mtime_ns, target))


def local_items(source: Source, name: str, looks: Looks) -> Iterator[bytes]:
    """Of a file under this name, of a directory what it holds. `FileFailure` for one that changed since it was looked at."""
    for item in source.items:
        path = os.fsencode(item.path if source.directory else name)
        yield looks.of(
            path, item.kind, item.mode, item.mtime_ns, os.fsencode(item.content) if item.kind == "l" else b""
        )
        if item.kind == "f":
            yield from _content(item)


def _content(item: Item) -> Iterator[bytes]:
    digest = hashlib.sha256()
    with open_file(item.local) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            yield blob(piece)
    if digest.hexdigest() != item.content:
        raise FileFailure(f"{item.local} changed while it was copied", hint="build again")
    yield blob(b"")


def inline_item(name: str, content: str, looks: Looks, mode: int = 0o644) -> Iterator[bytes]:
    data = content.encode("utf-8", "surrogateescape")
    yield looks.of(os.fsencode(name), "f", mode, time.time_ns())
    for at in range(0, len(data), PIECE):
        yield blob(data[at : at + PIECE])
    yield blob(b"")


def directory_items(names: Iterable[bytes], looks: Looks) -> Iterator[bytes]:
    """Directories, one in another."""
    path = b""
    for name in names:
        path = posixpath.join(path, name)
        yield looks.of(path, "d", DIRECTORY_MODE, time.time_ns())


class Excluding:
    """Which items of a tree go along, so that each one's directory is there before it."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = PatternMatcher(list(patterns))

    def drops(self, path: str, directory: bool) -> bool:
        return self._patterns.matches(path) and not (directory and self._patterns.may_match_under(path))


# --- archives


def is_archive(local: str) -> bool:
    """Whether ADD unpacks it."""
    try:
        with open_file(local) as file, tarfile.open(fileobj=file):
            return True
    except _BROKEN:
        return False


def archive_items(local: str, looks: Looks) -> Iterator[bytes]:
    """What it holds. Owners are the archive's unless `looks` has one. `FileFailure` names a member that cannot be unpacked."""
    made: set[str] = {""}
    with open_file(local) as file, tarfile.open(fileobj=file) as archive:
        try:
            for member in archive:
                yield from _member(archive, member, looks, made, local)
        except (*_BROKEN, KeyError) as error:  # of a hard link to what is not there
            raise FileFailure(f"{local} cannot be unpacked: {error}", hint="on this host") from error


def _member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, looks: Looks, made: set[str], local: str
) -> Iterator[bytes]:
    path = posixpath.normpath("/" + member.name).lstrip("/")
    if ".." in member.name.split("/"):
        raise FileFailure(f"{local}: {member.name!r} leads out of the archive")
    if not path:
        return
    yield from _above(path, looks, made)
    owner, mtime = Owner(member.uid, member.gid), int(member.mtime * 1e9)
    name, mode = os.fsencode(path), member.mode & 0o7777
    if member.isdir():
        made.add(path)
        yield looks.of(name, "d", mode, mtime, owner=owner)
    elif member.issym():
        yield looks.of(name, "l", 0o777, mtime, os.fsencode(member.linkname), owner=owner)
    elif member.isreg() or member.islnk():
        content = archive.extractfile(member)
        if content is None:
            raise FileFailure(f"{local}: {member.name!r} links to what is not in it")
        yield looks.of(name, "f", mode, mtime, owner=owner)
        yield from _pieces(content)
    else:
        raise FileFailure(f"{local}: {member.name!r} is a device or FIFO", hint="a sandbox has none")


def _above(path: str, looks: Looks, made: set[str]) -> Iterator[bytes]:
    """Directories that the archive does not list before what lies in them."""
    parts = path.split("/")[:-1]
    for at in range(1, len(parts) + 1):
        if (above := "/".join(parts[:at])) not in made:
            made.add(above)
            yield looks.of(os.fsencode(above), "d", DIRECTORY_MODE, time.time_ns())


def _pieces(content: IO[bytes]) -> Iterator[bytes]:
    while piece := content.read(PIECE):
        yield blob(piece)
    yield blob(b"")


def owner_of(entry: Entry) -> Owner:
    return Owner(0 if entry.uid == KEEP else entry.uid, 0 if entry.gid == KEEP else entry.gid)
