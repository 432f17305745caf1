"""The layer store of one host: images by content, and the names that point to them."""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from barchan.errors import CreateFailed, EnvironmentNotFound, InvalidRequest, LayerCorrupt
from barchan.images import NO_CONFIG, ImageConfig
from barchan.kernel import directories
from barchan.layers import refs
from barchan.names import check_name

_SUPERBLOCK_AT = 1024
_SUPERBLOCK = struct.Struct("<III")
_MAGIC = 0xE0F5E1E2
_VERSION_FILE = re.compile(r"([1-9][0-9]{0,8})\.json")


class Layer(msgspec.Struct, frozen=True):
    """One immutable image. `name` and `version` say how it was asked for; "" and 0 for a bare digest."""

    digest: str
    path: Path
    size: int
    name: str = ""
    version: int = 0
    below: tuple[Layer, ...] = ()
    """The other layers of the same image, bottom first."""
    image: str = ""
    """Digest of that image; "" when it is this layer alone."""
    config: ImageConfig = NO_CONFIG

    @property
    def reference(self) -> str:
        """The one name that always means this."""
        return f"{self.name}@{self.version}" if self.version else self.image or self.digest


class NameEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a name. `created` is in Unix seconds, `size` in bytes. `digest` is of a layer or a `StackFile`."""

    name: str
    version: int
    digest: str
    size: int
    created: float
    source: str = ""
    kind: str = ""


class StackFile(msgspec.Struct, frozen=True, kw_only=True):
    """An image of several layers, bottom first, and what it says about programs started in it."""

    layers: tuple[str, ...]
    config: ImageConfig = NO_CONFIG


class _Stamp(msgspec.Struct, frozen=True):
    """The file that was hashed and found right. A change to any of these means: hash it again."""

    inode: int
    mtime_ns: int
    size: int


class LayerStore:
    """Content-addressed images and their names.

        <root>/
          sha256/<hex>.erofs        image, 0400, never changed once it has this name
          verified/<hex>            which inode, mtime and size were last hashed and found right
          stacks/<hex>.json         images of several layers, named by their own SHA-256
          converted/<diff id>/      what became of the layers of OCI images (`conversions`)
          names/<name>/<N>.json     versions, counting up from 1
          names/<name>/lock         held while a version is added or removed
          lock                      shared while an image is added, exclusive while unnamed ones are removed
          tmp/                      work in progress; `sweep` empties it

    Any number of processes may use it at once. A file appears under its final name only when it is complete and on
    disk. Adding content that is there already makes no second copy, and no new version when the newest has it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._images, self._names = root / "sha256", root / "names"
        self._verified, self._tmp = root / "verified", root / "tmp"
        self._stacks, self.converted = root / "stacks", root / "converted"
        every = (root, self._images, self._names, self._verified, self._tmp, self._stacks, self.converted)
        for directory in every:
            directories.private(directory)

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """A fresh directory on the store's file system, removed afterwards."""
        path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self._tmp))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def sweep(self) -> None:
        """Remove work of processes that are gone."""
        for entry in self._tmp.iterdir():
            owner = entry.name.partition("-")[0]
            if not (owner.isdigit() and Path("/proc", owner).exists()):
                shutil.rmtree(entry, ignore_errors=True)

    def add(self, image: Path, name: str, *, source: str = "", kind: str = "") -> Layer:
        """Take over an image file that lies on the store's file system, under the next version of `name`."""
        check_name(name, "name")
        digest = "sha256:" + digest_of(image)
        with _flock(self.root / "lock", fcntl.LOCK_SH), self._locked(name) as directory:
            path, size = self._place(image, digest)
            entry = self._next_version(directory, name, digest, size, source, kind)
        return Layer(digest, path, size, name, entry.version)

    def _next_version(self, directory: Path, name: str, digest: str, size: int, source: str, kind: str) -> NameEntry:
        newest = max(self._versions(name), default=0)
        if newest and (entry := self._entry(name, newest)).digest == digest:
            return entry
        entry = NameEntry(
            name=name, version=newest + 1, digest=digest, size=size, created=time.time(), source=source, kind=kind
        )
        _write(directory / f"{entry.version}.json", msgspec.json.format(msgspec.json.encode(entry)))
        return entry

    def add_stack(
        self, images: Mapping[str, Path], stack: StackFile, name: str, *, source: str = "", kind: str = ""
    ) -> NameEntry:
        """Take over the images of a stack, by digest, under the next version of `name`.

        Layers of the stack that are not in `images` must be in the store: `CreateFailed` when one was removed meanwhile.
        """
        check_name(name, "name")
        document = msgspec.json.format(msgspec.json.encode(stack, order="deterministic"))
        digest = "sha256:" + hashlib.sha256(document).hexdigest()
        with _flock(self.root / "lock", fcntl.LOCK_SH), self._locked(name) as directory:
            for layer, image in images.items():
                self._place(image, layer)
            if gone := [layer for layer in stack.layers if not self._path(layer).exists()]:
                raise CreateFailed(f"layer {gone[0]} was removed meanwhile", hint="import again", phase="convert")
            _write(self._stacks / f"{refs.hex_of(digest)}.json", document)
            size = sum(self._path(layer).stat().st_size for layer in stack.layers)
            return self._next_version(directory, name, digest, size, source, kind)

    def stack(self, digest: str) -> StackFile | None:
        """The image of that digest; None when it is of a single layer, or unknown."""
        try:
            return msgspec.json.decode((self._stacks / f"{refs.hex_of(digest)}.json").read_bytes(), type=StackFile)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise LayerCorrupt(f"image {digest} cannot be read: {error}", hint=_REMEDY, phase="resolve") from error

    def _place(self, image: Path, digest: str) -> tuple[Path, int]:
        path, size = self._path(digest), image.stat().st_size
        if path.exists() and path.stat().st_size == size:
            image.unlink()
            return path, size
        image.chmod(0o400)
        _sync(image)
        os.replace(image, path)
        _sync(path.parent)
        return path, size

    def image_path(self, digest: str) -> Path:
        """Where the image of a layer is, or would be."""
        return self._path(digest)

    def resolve(self, ref: str, field: str = "environment") -> Layer:
        """The layer that a reference names; of a stack the top one. `EnvironmentNotFound` tells names that are near."""
        wanted = refs.parse(ref, field)
        if wanted.digest:
            return self._layer(wanted.digest, "", 0, ref)
        versions = self._versions(wanted.name)
        if not versions:
            raise EnvironmentNotFound(f"no environment {wanted.name!r}", hint=self._near(wanted.name), field=field)
        version = max(versions) if not wanted.version else self._numbered(wanted, versions, field)
        return self._layer(self._entry(wanted.name, version).digest, wanted.name, version, ref)

    def changed(self, name: str) -> int:
        """When a version of a name was last added or removed, in ns since 1970 by the file system's clock; 0 for none."""
        try:
            return os.stat(self._names / name).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _numbered(self, wanted: refs.Ref, versions: tuple[int, ...], field: str) -> int:
        if wanted.version.isdigit() and int(wanted.version) in versions:
            return int(wanted.version)
        known = ", ".join(str(v) for v in sorted(versions)[-10:])
        raise EnvironmentNotFound(f"no version {wanted}", hint=f"versions: {known}", field=field)

    def _near(self, name: str) -> str:
        names = sorted(entry.name for entry in self._names.iterdir() if self._versions(entry.name))
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        if near:
            return "did you mean " + ", ".join(near) + "?"
        return "known: " + ", ".join(names[:10]) if names else "none is known: `barchan env bootstrap debian-12`"

    def _layer(self, digest: str, name: str, version: int, ref: str) -> Layer:
        stack = self.stack(digest)
        if stack is None:
            return self._single(digest, name, version, ref)
        *below, top = (self._single(layer, name or ref, version, ref) for layer in stack.layers)
        return msgspec.structs.replace(top, name=name, below=tuple(below), image=digest, config=stack.config)

    def _single(self, digest: str, name: str, version: int, ref: str) -> Layer:
        path = self._path(digest)
        try:
            return Layer(digest, path, path.stat().st_size, name, version)
        except FileNotFoundError as error:
            if not name:
                raise EnvironmentNotFound(f"no layer {ref}", hint="`barchan env ls` lists what is here") from error
            raise LayerCorrupt(f"{ref}: its image {digest} is missing", hint=_REMEDY, phase="resolve") from error

    def list(self) -> tuple[NameEntry, ...]:
        """Every version of every name, by name and version."""
        names = sorted(entry.name for entry in self._names.iterdir() if entry.is_dir())
        return tuple(self._entry(name, version) for name in names for version in sorted(self._versions(name)))

    def remove(self, ref: str) -> None:
        """Forget `name@version`, or every version of `name`; images that no name points to any more go too.

        An image that is mounted stays readable for those who have it. `EnvironmentNotFound` if there is none.
        """
        wanted = refs.parse(ref)
        if wanted.digest:
            raise InvalidRequest("environment: remove names, not digests", field="environment")
        layer = self.resolve(ref)
        with _flock(self.root / "lock", fcntl.LOCK_EX):
            self._forget(wanted, layer)
            self._remove_unnamed()

    def _forget(self, wanted: refs.Ref, layer: Layer) -> None:
        with self._locked(wanted.name) as directory:
            for version in (layer.version,) if wanted.version else self._versions(wanted.name):
                (directory / f"{version}.json").unlink(missing_ok=True)

    def _remove_unnamed(self) -> None:
        named = {entry.digest for entry in self.list()}
        used = set(named)
        for document in self._stacks.glob("*.json"):
            digest = f"sha256:{document.stem}"
            if digest in named and (stack := self.stack(digest)):
                used.update(stack.layers)
            elif digest not in named:
                document.unlink(missing_ok=True)
        for image in self._images.glob("*.erofs"):
            if f"sha256:{image.stem}" not in used:
                (self._verified / image.stem).unlink(missing_ok=True)
                image.unlink(missing_ok=True)
        kept = {image.stem for image in self._images.glob("*.erofs")}
        for record in self.converted.glob("*/*.json"):
            if record.stem not in kept:
                record.unlink(missing_ok=True)

    def check(self, layer: Layer) -> None:
        """Before a mount: the superblock, and the whole content unless this very file was hashed before."""
        _check_superblock(layer.path, layer.digest)
        stamp = self._verified / refs.hex_of(layer.digest)
        try:
            known = msgspec.json.decode(stamp.read_bytes(), type=_Stamp)
        except (FileNotFoundError, msgspec.DecodeError):
            known = None
        if known != _stamp_of(layer.path):
            self.verify(layer.digest)

    def verify(self, digest: str) -> None:
        """Read the whole image and compare. `LayerCorrupt` names the digest and the remedy."""
        path = self._path(digest)
        stamp = self._verified / refs.hex_of(digest)
        try:
            seen = _stamp_of(path)
            found = digest_of(path)
        except OSError as error:
            raise LayerCorrupt(f"layer {digest} cannot be read: {error}", hint=_REMEDY, phase="verify") from error
        if found != refs.hex_of(digest):
            stamp.unlink(missing_ok=True)
            raise LayerCorrupt(f"layer {digest} has changed: it hashes to sha256:{found}", hint=_REMEDY, phase="verify")
        _write(stamp, msgspec.json.encode(seen))

    def _path(self, digest: str) -> Path:
        return self._images / f"{refs.hex_of(digest)}.erofs"

    def _versions(self, name: str) -> tuple[int, ...]:
        try:
            found = [_VERSION_FILE.fullmatch(entry) for entry in os.listdir(self._names / name)]
        except (FileNotFoundError, NotADirectoryError):
            return ()
        return tuple(int(match[1]) for match in found if match)

    def _entry(self, name: str, version: int) -> NameEntry:
        path = self._names / name / f"{version}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=NameEntry)
        except (OSError, msgspec.DecodeError) as error:
            raise LayerCorrupt(f"{name}@{version} cannot be read: {error}", hint=_REMEDY, phase="resolve") from error

    @contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        directory = self._names / name
        directories.private(directory)
        with _flock(directory / "lock", fcntl.LOCK_EX):
            yield directory


@contextmanager
def _flock(path: Path, kind: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


_REMEDY = "remove it with `barchan env rm` and import it again"


def digest_of(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp_of(path: Path) -> _Stamp:
    stat = path.stat()
    return _Stamp(stat.st_ino, stat.st_mtime_ns, stat.st_size)


def _check_superblock(path: Path, digest: str) -> None:
    """Magic number and length; the kernel checks the superblock's checksum when it mounts."""
    try:
        with path.open("rb") as file:
            file.seek(_SUPERBLOCK_AT)
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise LayerCorrupt(f"layer {digest} cannot be read: {error}", hint=_REMEDY, phase="verify") from error
    if len(head) < 64 or _SUPERBLOCK.unpack_from(head)[0] != _MAGIC:
        raise LayerCorrupt(f"layer {digest} has no EROFS superblock", hint=_REMEDY, phase="verify")
    blocks, shift = struct.unpack_from("<I", head, 36)[0], head[12]
    if blocks << shift > size:
        raise LayerCorrupt(
            f"layer {digest} is cut short: {size} of {blocks << shift} bytes", hint=_REMEDY, phase="verify"
        )


def _write(path: Path, data: bytes) -> None:
    """All of it under its name, or nothing."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.touch(0o600)
    part.write_bytes(data)
    _sync(part)
    os.replace(part, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
