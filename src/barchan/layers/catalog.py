"""Names of environments and images, and what each version of them is.

    <root>/<name>/<N>.json          versions, counting up from 1
    <root>/<name>/tag.<tag>.json    which version a tag means now
    <root>/<name>/alias.json        instead of these: what the name stands for
    <root>/<name>/lock              held while any of it is changed

Tags and aliases are set by `pointers`. The name of an image is its whole reference; its directory is called after the hash of that. Any number of processes may use a
catalog at once. A file appears under its name only when it is complete and on disk.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from barchan.errors import EnvironmentNotFound, InvalidRequest, LayerCorrupt
from barchan.image_refs import is_image, parse_image
from barchan.kernel import directories
from barchan.layers.refs import Ref, parse
from barchan.names import BUILD_STEP
from barchan.wire.messages import EnvironmentInfo

_VERSION_FILE = re.compile(r"([1-9][0-9]{0,8})\.json")
_TAG_FILE = re.compile(r"tag\.(.+)\.json")
_ALIAS_FILE = "alias.json"
MOST_ALIASES = 8
"""That lead from one to the next."""
_IMAGE = "image-"
"""How directories of images are called, before 64 hex digits: longer than any other name may be."""
_UNSPOKEN = re.compile(rf"{_IMAGE}|{BUILD_STEP.pattern}$")
"""What nobody means who writes a name wrongly."""
REMEDY = "remove it with `barchan env rm` and import it again"


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """How a layer was packed from the sandbox that `NameEntry.source` names. As who programs run in it, its `ImageConfig` says."""

    operation: str = ""
    """Key of the request."""
    environment: tuple[str, ...] = ()
    """What the sandbox was made of, from the bottom."""
    entries: int = 0
    content: int = 0
    """Bytes of its files."""
    left_out: Mapping[str, int] = {}
    renamed: int = 0
    completed: int = 0


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
    provenance: Provenance | None = None

    @property
    def reference(self) -> str:
        """The one name that always means this."""
        if self.manifest:
            return str(parse_image(self.name).pinned(self.manifest))
        return f"{self.name}@{self.version}"


def described(entry: NameEntry, tags: tuple[str, ...] = ()) -> EnvironmentInfo:
    """For callers."""
    return EnvironmentInfo(
        name=entry.name,
        version=entry.version,
        digest=entry.digest,
        size=entry.size,
        created=entry.created,
        reference=entry.reference,
        tags=tags,
    )


class Tag(msgspec.Struct, frozen=True):
    """`changed` is in Unix seconds."""

    version: int
    changed: float


class Alias(msgspec.Struct, frozen=True):
    """`target` is a reference. `changed` is in Unix seconds."""

    target: str
    changed: float


class Catalog:
    def __init__(self, root: Path) -> None:
        self.root = root

    # --- reads

    def entries(self) -> tuple[NameEntry, ...]:
        """Every version of every name, by name and version."""
        return tuple(self._read(folder, version) for folder in self._folders() for version in sorted(_versions(folder)))

    def find(self, wanted: Ref, field: str = "environment") -> NameEntry:
        """The version that is meant, no aliases followed. `EnvironmentNotFound` tells names that are near."""
        versions = self.versions(wanted.name)
        if not versions:
            raise EnvironmentNotFound(f"no environment {wanted.name!r}", hint=self._near(wanted.name), field=field)
        if wanted.tag:
            return self.entry(wanted.name, self._tagged(wanted, field))
        if not wanted.version:
            return self.entry(wanted.name, max(versions))
        if wanted.version.isdigit() and int(wanted.version) in versions:
            return self.entry(wanted.name, int(wanted.version))
        known = ", ".join(str(version) for version in sorted(versions)[-10:])
        raise EnvironmentNotFound(f"no version {wanted}", hint=f"versions: {known}", field=field)

    def follow(self, wanted: Ref, field: str = "environment") -> tuple[Ref, ...]:
        """Itself, and from alias to alias what it stands for. Raises `EnvironmentNotFound`, `InvalidRequest`."""
        trail = [wanted]
        while trail[-1].name and (alias := self.alias(trail[-1].name)) is not None:
            if trail[-1].version or trail[-1].tag:
                told = f"{trail[-1].name} is an alias of {alias.target}"
                raise EnvironmentNotFound(f"no environment {trail[-1]}", hint=f"{told}: name it alone", field=field)
            meant = parse(alias.target, field)
            if meant in trail or len(trail) > MOST_ALIASES:
                raise InvalidRequest(f"{wanted} leads from alias to alias: {meant}", hint="change one", field=field)
            trail.append(meant)
        return tuple(trail)

    def versions(self, name: str) -> tuple[int, ...]:
        return _versions(self._folder(name))

    def tags(self, name: str) -> dict[str, int]:
        """Versions by tag."""
        folder = self._folder(name)
        found = (_TAG_FILE.fullmatch(entry) for entry in _listed(folder))
        return {match[1]: tag.version for match in found if match and (tag := _pointer(folder / match[0], Tag))}

    def alias(self, name: str) -> Alias | None:
        return None if is_image(name) else _pointer(self._folder(name) / _ALIAS_FILE, Alias)

    def aliases(self) -> dict[str, str]:
        """What each stands for."""
        found = {folder.name: _pointer(folder / _ALIAS_FILE, Alias) for folder in self._folders()}
        return {name: alias.target for name, alias in sorted(found.items()) if alias}

    def digests(self) -> set[str]:
        """What versions and aliases stand for."""
        aliased = {parse(target).digest for target in self.aliases().values()} - {""}
        return aliased | {entry.digest for entry in self.entries()}

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
        """The next version, unless the newest is the same. Its name is locked. `InvalidRequest` if it is an alias."""
        if (alias := self.alias(made.name)) is not None:
            hint = f"`barchan env rm {made.name}` removes the alias"
            raise InvalidRequest(f"{made.name} is an alias of {alias.target}", hint=hint, field="name")
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

    def point(self, wanted: Ref, to: Tag | Alias | None) -> None:
        """Set a tag (`wanted` has one) or an alias; None removes it. Its name is locked. Idempotent."""
        path = self._folder(wanted.name) / (f"tag.{wanted.tag}.json" if wanted.tag else _ALIAS_FILE)
        if to is None:
            path.unlink(missing_ok=True)
        else:
            write(path, msgspec.json.format(msgspec.json.encode(to)))

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

    def _tagged(self, wanted: Ref, field: str) -> int:
        tags = self.tags(wanted.name)
        if wanted.tag not in tags:
            known = f"tags: {', '.join(sorted(tags)[:10])}" if tags else f"`barchan env tag {wanted.name} {wanted.tag}`"
            raise EnvironmentNotFound(f"no tag {wanted}", hint=known, field=field)
        return tags[wanted.tag]

    def _near(self, name: str) -> str:
        folders = [folder for folder in self._folders() if not _UNSPOKEN.match(folder.name)]
        names = [folder.name for folder in folders if _versions(folder) or (folder / _ALIAS_FILE).exists()]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        if near:
            return "did you mean " + ", ".join(near) + "?"
        return "known: " + ", ".join(names[:10]) if names else "none is known: `barchan env bootstrap debian-12`"


def _versions(folder: Path) -> tuple[int, ...]:
    found = [_VERSION_FILE.fullmatch(entry) for entry in _listed(folder)]
    return tuple(int(match[1]) for match in found if match)


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


P = TypeVar("P", Tag, Alias)


def _pointer(path: Path, type_: type[P]) -> P | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        shown = f"{path.parent.name}/{path.name}"
        raise LayerCorrupt(f"{shown} cannot be read: {error}", hint="set it again", phase="resolve") from error


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
