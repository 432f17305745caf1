"""Names of environments and images, and what each version of them is.

    <root>/<name>/<N>.json    versions, counting up from 1
    <root>/<name>/lock        held while a version is added or removed

The name of an image is its whole reference; its directory is called after the hash of that. Any number of processes may use a
catalog at once. A file appears under its name only when it is complete and on disk.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from barchan.errors import EnvironmentNotFound, LayerCorrupt
from barchan.image_refs import is_image, parse_image
from barchan.kernel import directories
from barchan.layers.refs import Ref

_VERSION_FILE = re.compile(r"([1-9][0-9]{0,8})\.json")
_IMAGE = "image-"
"""How directories of images are called, before 64 hex digits: longer than any other name may be."""
REMEDY = "remove it with `barchan env rm` and import it again"


class NameEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a name. `created` is in Unix seconds, `size` in bytes. `digest` is of a layer or a `StackFile`."""

    name: str
    version: int = 0
    digest: str
    size: int
    created: float = 0.0
    source: str = ""
    kind: str = ""
    manifest: str = ""
    """Digest by which its registry knows an image."""

    @property
    def reference(self) -> str:
        """The one name that always means this."""
        if self.manifest:
            return str(parse_image(self.name).pinned(self.manifest))
        return f"{self.name}@{self.version}"


class Catalog:
    def __init__(self, root: Path) -> None:
        self.root = root

    # --- reads

    def entries(self) -> tuple[NameEntry, ...]:
        """Every version of every name, by name and version."""
        return tuple(self._read(folder, version) for folder in self._folders() for version in sorted(_versions(folder)))

    def find(self, wanted: Ref, field: str = "environment") -> NameEntry:
        """`EnvironmentNotFound` tells names that are near."""
        versions = self.versions(wanted.name)
        if not versions:
            raise EnvironmentNotFound(f"no environment {wanted.name!r}", hint=self._near(wanted.name), field=field)
        if not wanted.version:
            return self.entry(wanted.name, max(versions))
        if wanted.version.isdigit() and int(wanted.version) in versions:
            return self.entry(wanted.name, int(wanted.version))
        known = ", ".join(str(version) for version in sorted(versions)[-10:])
        raise EnvironmentNotFound(f"no version {wanted}", hint=f"versions: {known}", field=field)

    def versions(self, name: str) -> tuple[int, ...]:
        return _versions(self._folder(name))

    def entry(self, name: str, version: int) -> NameEntry:
        return self._read(self._folder(name), version)

    def changed(self, name: str) -> int:
        """When a version of a name was last added or removed, in ns since 1970 by the file system's clock; 0 for none."""
        try:
            return os.stat(self._folder(name)).st_mtime_ns
        except FileNotFoundError:
            return 0

    # --- changes

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """For changing it."""
        folder = self._folder(name)
        directories.private(folder)
        with flock(folder / "lock", fcntl.LOCK_EX):
            yield

    def add(self, made: NameEntry) -> NameEntry:
        """The next version, unless the newest is the same. Its name is locked."""
        newest = max(self.versions(made.name), default=0)
        if (
            newest
            and (entry := self.entry(made.name, newest)).digest == made.digest
            and entry.manifest == made.manifest
        ):
            return entry
        entry = msgspec.structs.replace(made, version=newest + 1, created=time.time())
        write(self._folder(made.name) / f"{entry.version}.json", msgspec.json.format(msgspec.json.encode(entry)))
        return entry

    def forget(self, name: str, version: int) -> None:
        """Its name is locked. Idempotent."""
        (self._folder(name) / f"{version}.json").unlink(missing_ok=True)

    # --- where it is

    def _folder(self, name: str) -> Path:
        if is_image(name):
            name = _IMAGE + hashlib.sha256(name.encode()).hexdigest()
        return self.root / name

    def _folders(self) -> Sequence[Path]:
        return sorted(Path(entry) for entry in os.scandir(self.root) if entry.is_dir())

    def _read(self, folder: Path, version: int) -> NameEntry:
        try:
            return msgspec.json.decode((folder / f"{version}.json").read_bytes(), type=NameEntry)
        except (OSError, msgspec.DecodeError) as error:
            shown = f"{folder.name}@{version}"
            raise LayerCorrupt(f"{shown} cannot be read: {error}", hint=REMEDY, phase="resolve") from error

    def _near(self, name: str) -> str:
        names = [folder.name for folder in self._folders() if not folder.name.startswith(_IMAGE) and _versions(folder)]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        if near:
            return "did you mean " + ", ".join(near) + "?"
        return "known: " + ", ".join(names[:10]) if names else "none is known: `barchan env bootstrap debian-12`"


def _versions(folder: Path) -> tuple[int, ...]:
    try:
        found = [_VERSION_FILE.fullmatch(entry) for entry in os.listdir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(int(match[1]) for match in found if match)


@contextmanager
def flock(path: Path, kind: int) -> Iterator[None]:
    """`kind`: LOCK_SH or LOCK_EX."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


def write(path: Path, data: bytes) -> None:
    """All of it under its name and on disk, or nothing."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.touch(0o600)
    part.write_bytes(data)
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
