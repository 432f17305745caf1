"""The layer store of one host: images by content, and the names that point to them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from barchan.errors import CreateFailed, EnvironmentNotFound, InvalidRequest, LayerCorrupt
from barchan.images import NO_CONFIG, ImageConfig
from barchan.kernel import directories
from barchan.layers import pointers, refs
from barchan.layers.catalog import REMEDY, Catalog, NameEntry, Provenance, flock, sync, write
from barchan.names import check_name

_SUPERBLOCK_AT = 1024
_SUPERBLOCK = struct.Struct("<III")
_MAGIC = 0xE0F5E1E2


class Layer(msgspec.Struct, frozen=True):
    """One immutable image. `name` and `version` say how it was asked for; "" and 0 for a bare digest."""

    digest: str
    path: Path
    size: int
    name: str = ""
    version: int = 0
    reference: str = ""
    """The one name that always means this."""
    below: tuple[Layer, ...] = ()
    """The other layers of the same image, bottom first."""
    config: ImageConfig = NO_CONFIG


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
          names/                    what names mean (`catalog`)
          lock                      shared while an image is added, exclusive while unnamed ones are removed
          pulling/<hash>            held while an image is fetched
          unused/<hex>              since when nothing reaches a layer (`gc`)
          prefetch/<hex>.json       what of a layer is read ahead (`prefetch`)
          tmp/                      work in progress; `sweep` empties it

    Any number of processes may use it at once. A file appears under its final name only when it is complete and on
    disk. Adding content that is there already makes no second copy, and no new version when the newest has it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._images, self.catalog = root / "sha256", Catalog(root / "names")
        self._verified, self._tmp = root / "verified", root / "tmp"
        self._stacks, self.converted, self.pulling = root / "stacks", root / "converted", root / "pulling"
        self.unused, self.prefetch = root / "unused", root / "prefetch"
        every = (
            root,
            self._images,
            self.catalog.root,
            self._verified,
            self._tmp,
            self._stacks,
            self.converted,
            self.pulling,
            self.unused,
            self.prefetch,
        )
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

    def add(
        self, image: Path, name: str, *, source: str = "", kind: str = "", provenance: Provenance | None = None
    ) -> Layer:
        """Take over an image file that lies on the store's file system, under the next version of `name`."""
        check_name(name, "name")
        digest = "sha256:" + digest_of(image)
        with flock(self.root / "lock", fcntl.LOCK_SH), self.catalog.locked(name):
            path, size = self._place(image, digest)
            made = NameEntry(name=name, digest=digest, size=size, source=source, kind=kind, provenance=provenance)
            entry = self.catalog.add(made)
        return Layer(digest, path, size, name, entry.version, entry.reference)

    def add_stack(
        self,
        images: Mapping[str, Path],
        stack: StackFile,
        name: str,
        *,
        source: str,
        kind: str,
        manifest: str = "",
        provenance: Provenance | None = None,
    ) -> NameEntry:
        """Take over the images of a stack, by digest, under the next version of `name`: of an image its reference.

        Layers of the stack that are not in `images` must be in the store: `CreateFailed` when one was removed meanwhile.
        """
        refs.parse(name, "name")
        document = msgspec.json.format(msgspec.json.encode(stack, order="deterministic"))
        digest = "sha256:" + hashlib.sha256(document).hexdigest()
        with flock(self.root / "lock", fcntl.LOCK_SH), self.catalog.locked(name):
            for layer, image in images.items():
                self._place(image, layer)
            if gone := [layer for layer in stack.layers if not self._path(layer).exists()]:
                raise CreateFailed(f"layer {gone[0]} was removed meanwhile", hint="import again", phase="convert")
            write(self._stacks / f"{refs.hex_of(digest)}.json", document)
            size = sum(self._path(layer).stat().st_size for layer in stack.layers)
            made = NameEntry(name=name, digest=digest, size=size, source=source, kind=kind, manifest=manifest)
            return self.catalog.add(msgspec.structs.replace(made, provenance=provenance))

    def stack(self, digest: str) -> StackFile | None:
        """The image of that digest; None when it is of a single layer, or unknown."""
        try:
            document = (self._stacks / f"{refs.hex_of(digest)}.json").read_bytes()
            if (found := "sha256:" + hashlib.sha256(document).hexdigest()) != digest:
                raise LayerCorrupt(f"image {digest} has changed: it hashes to {found}", hint=REMEDY, phase="resolve")
            return msgspec.json.decode(document, type=StackFile)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise LayerCorrupt(f"image {digest} cannot be read: {error}", hint=REMEDY, phase="resolve") from error

    def _place(self, image: Path, digest: str) -> tuple[Path, int]:
        path, size = self._path(digest), image.stat().st_size
        if path.exists() and path.stat().st_size == size:
            image.unlink()
            return path, size
        image.chmod(0o400)
        sync(image)
        os.replace(image, path)
        sync(path.parent)
        return path, size

    def image_path(self, digest: str) -> Path:
        """Where the image of a layer is, or would be."""
        return self._path(digest)

    def resolve(self, ref: str, field: str = "environment") -> Layer:
        """The layer that a reference names; of a stack the top one. `EnvironmentNotFound` tells names that are near."""
        wanted = self.catalog.follow(refs.parse(ref, field), field)[-1]
        if wanted.digest:
            return self._layer(wanted.digest, ref, reference=wanted.digest)
        entry = self.catalog.find(wanted, field)
        return self._layer(entry.digest, ref, entry.name, entry.version, entry.reference)

    def _layer(self, digest: str, ref: str, name: str = "", version: int = 0, reference: str = "") -> Layer:
        stack = self.stack(digest)
        if stack is None:
            return self._single(digest, name, version, ref, reference)
        *below, top = (self._single(layer, name or ref, version, ref, reference) for layer in stack.layers)
        return msgspec.structs.replace(top, name=name, below=tuple(below), config=stack.config)

    def _single(self, digest: str, name: str, version: int, ref: str, reference: str) -> Layer:
        path = self._path(digest)
        try:
            return Layer(digest, path, path.stat().st_size, name, version, reference)
        except FileNotFoundError as error:
            if not name:
                raise EnvironmentNotFound(f"no layer {ref}", hint="`barchan env ls` lists what is here") from error
            raise LayerCorrupt(f"{ref}: its image {digest} is missing", hint=REMEDY, phase="resolve") from error

    def remove(self, ref: str) -> tuple[NameEntry, ...]:
        """Forget `name@version`, or every version of `name`; returns them. The layers go later (`gc`). Of a tag or an alias
        only itself is forgotten, which is no version.

        `EnvironmentNotFound` if there is none, `InvalidRequest` if a tag or an alias would then mean nothing (`pointers`).
        """
        wanted = refs.parse(ref)
        if wanted.digest:
            raise InvalidRequest("environment: remove names, not digests", field="environment")
        if pointers.drop(self, ref):
            return ()
        with flock(self.root / "lock", fcntl.LOCK_EX):
            entry = self.catalog.find(wanted)
            pointers.check_unused(self.catalog, wanted, entry)
            return self._forget(wanted, entry)

    def _forget(self, wanted: refs.Ref, entry: NameEntry) -> tuple[NameEntry, ...]:
        """The name by which an image is pinned goes with the last one that somebody gave it."""
        with self.catalog.locked(wanted.name):
            gone = (entry.version,) if wanted.version else self.catalog.versions(wanted.name)
            removed = tuple(self.catalog.entry(wanted.name, version) for version in gone)
            for version in gone:
                self.catalog.forget(wanted.name, version)
            for tag in self.catalog.tags(wanted.name) if not self.catalog.versions(wanted.name) else ():
                self.catalog.point(refs.Ref(name=wanted.name, tag=tag), None)
        self._used_until_now(removed)
        kept = {one.reference for one in self.catalog.entries() if one.name != one.reference}
        for name in {one.reference for one in removed if one.manifest} - kept:
            with self.catalog.locked(name):
                for version in self.catalog.versions(name):
                    self.catalog.forget(name, version)
        return removed

    def _used_until_now(self, removed: tuple[NameEntry, ...]) -> None:
        """Somebody may have resolved the name a moment ago: its layers count as unused from now on, whatever was before."""
        for entry in removed:
            for digest in self.layers_of(entry.digest):
                (self.unused / refs.hex_of(digest)).unlink(missing_ok=True)

    # --- for `gc`, with the store's lock held

    def sizes(self) -> dict[str, int]:
        """Bytes of every layer, by digest."""
        return {f"sha256:{image.stem}": image.stat().st_size for image in self._images.glob("*.erofs")}

    def reached(self) -> set[str]:
        """Digests of the layers that names and aliases stand for."""
        return {layer for digest in self.catalog.digests() for layer in self.layers_of(digest)}

    def layers_of(self, digest: str) -> tuple[str, ...]:
        """Digests of the layers of an image, or of the one layer that it is."""
        stack = self.stack(digest)
        return stack.layers if stack else (digest,)

    def discard(self, digest: str) -> None:
        """Remove a layer. One that is mounted stays readable for those who have it. Idempotent."""
        (self._verified / refs.hex_of(digest)).unlink(missing_ok=True)
        self._path(digest).unlink(missing_ok=True)

    def discard_leftovers(self) -> None:
        """What speaks of images and layers that are gone."""
        named = self.catalog.digests()
        kept = {refs.hex_of(digest) for digest in self.sizes()}
        for document in self._stacks.glob("*.json"):
            if f"sha256:{document.stem}" not in named:
                document.unlink(missing_ok=True)
        for record in (*self.converted.glob("*/*.json"), *self.prefetch.glob("*.json")):
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
            raise LayerCorrupt(f"layer {digest} cannot be read: {error}", hint=REMEDY, phase="verify") from error
        if found != refs.hex_of(digest):
            stamp.unlink(missing_ok=True)
            raise LayerCorrupt(f"layer {digest} has changed: it hashes to sha256:{found}", hint=REMEDY, phase="verify")
        write(stamp, msgspec.json.encode(seen))

    def _path(self, digest: str) -> Path:
        return self._images / f"{refs.hex_of(digest)}.erofs"


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
        raise LayerCorrupt(f"layer {digest} cannot be read: {error}", hint=REMEDY, phase="verify") from error
    if len(head) < 64 or _SUPERBLOCK.unpack_from(head)[0] != _MAGIC:
        raise LayerCorrupt(f"layer {digest} has no EROFS superblock", hint=REMEDY, phase="verify")
    blocks, shift = struct.unpack_from("<I", head, 36)[0], head[12]
    if blocks << shift > size:
        raise LayerCorrupt(
            f"layer {digest} is cut short: {size} of {blocks << shift} bytes", hint=REMEDY, phase="verify"
        )
