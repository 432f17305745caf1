"""Where the parts of an image lie: files of a layout directory, or members of an archive."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from barchan.errors import InvalidRequest
from barchan.layers import tarwalk
from barchan.layers.oci_schema import Descriptor, wrong

MOST_DOCUMENT = 4 << 20
"""Bytes of one JSON document, what registries allow."""
MOST_PARTS = 100_000
"""Members of an archive that are looked at; a tree that is no image has more."""
_DEEPEST = 4
_COPY = 1 << 20
_LINKS = 8


class Parts(Protocol):
    """Files by relative name. `InvalidRequest` when there is none, or it is no regular file."""

    def open(self, name: str) -> IO[bytes]:
        """Seekable, at its start; the caller closes it."""

    def has(self, name: str) -> bool: ...


class Directory:
    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> IO[bytes]:
        try:
            # A FIFO must not hold us up.
            fd = os.open(self._root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _missing(name, error.strerror or "") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _missing(name, "not a regular file")
        return os.fdopen(fd, "rb")

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()


class Archive:
    """Members of an uncompressed tar. Of two with one name the later counts."""

    def __init__(self, path: Path, shown: str) -> None:
        self._path = path
        self._members: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with tarwalk.opened(path, shown, "resolve") as tar:
            for member in tar.members():
                if len(self._members) + len(self._links) < MOST_PARTS and member.name.count("/") <= _DEEPEST:
                    self._note(member)

    def _note(self, member: tarfile.TarInfo) -> None:
        name = posixpath.normpath(member.name)
        if member.isreg() and member.sparse is None:
            self._members[name] = (member.offset_data, member.size)
            self._links.pop(name, None)
        elif member.issym():
            # Older versions of `docker save` write a layer once and link to it.
            self._links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
        elif member.islnk():
            self._links[name] = posixpath.normpath(member.linkname)

    def _find(self, name: str) -> tuple[int, int] | None:
        name = posixpath.normpath(name)
        for _ in range(_LINKS):
            if name not in self._links:
                return self._members.get(name)
            name = self._links[name]
        return None

    def open(self, name: str) -> IO[bytes]:
        found = self._find(name)
        if found is None:
            raise _missing(name, "not in the archive")
        return io.BufferedReader(_Section(self._path, *found), _COPY)

    def has(self, name: str) -> bool:
        return self._find(name) is not None


class _Section(io.RawIOBase):
    """A range of a file."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._start, self._size, self._at = start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._size - self._at)]
        done = os.preadv(self._fd, [view], self._start + self._at) if view else 0
        self._at += done
        return done

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


def _missing(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the image lacks {name!r}: {why}", field="source", phase="pull")


def blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def document(parts: Parts, name: str) -> bytes:
    """A small file whole."""
    with parts.open(name) as file:
        data = file.read(MOST_DOCUMENT + 1)
    if len(data) > MOST_DOCUMENT:
        raise wrong(f"{name!r} is larger than {MOST_DOCUMENT} bytes")
    return data


def verified_document(parts: Parts, blob: Descriptor) -> bytes:
    data = document(parts, blob_name(blob.digest))
    algorithm, _, wanted = blob.digest.partition(":")
    _check(blob, len(data), wanted, hashlib.new(algorithm, data).hexdigest())
    return data


@contextmanager
def verified(parts: Parts, blob: Descriptor) -> Iterator[IO[bytes]]:
    """The blob at its start, after all of it was read and found to be what its digest says."""
    algorithm, _, wanted = blob.digest.partition(":")
    digest, size = hashlib.new(algorithm), 0
    with parts.open(blob_name(blob.digest)) as file:
        while piece := file.read(_COPY):
            size += len(piece)
            if size > blob.size:
                break
            digest.update(piece)
        _check(blob, size, wanted, digest.hexdigest())
        file.seek(0)
        yield file


def _check(blob: Descriptor, size: int, wanted: str, found: str) -> None:
    if size != blob.size:
        said = f"has {'more than ' if size > blob.size else ''}{min(size, blob.size)} bytes, not {blob.size}"
        raise InvalidRequest(f"blob {blob.digest} {said}", field="source", phase="pull")
    if found != wanted:
        raise InvalidRequest(
            f"blob {blob.digest} is damaged: it hashes to {found}", hint="copy it again", field="source", phase="pull"
        )
