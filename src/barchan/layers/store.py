"""The layer store of one host, or of several: layers by content, and the names that point to them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from barchan.errors import CreateFailed, EnvironmentNotFound, InvalidRequest, LayerCorrupt
from barchan.images import NO_CONFIG, ImageConfig
from barchan.kernel import directories
from barchan.layers import content as contents
from barchan.layers import pointers, refs, workplace
from barchan.layers.catalog import REMEDY, Catalog, NameEntry, Provenance, flock, sync, write
from barchan.layers.content import Content, Pace
from barchan.names import check_name


class Layer(msgspec.Struct, frozen=True):
    """One immutable layer. `name` and `version` say how it was asked for; "" and 0 for a bare digest."""

    digest: str
    path: Path
    """The directory of its files: see `content`."""
    size: int
    """Bytes that it takes."""
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
    """A file that was hashed and found right. A change to any of these means: hash it again."""

    inode: int
    mtime_ns: int
    size: int


class LayerStore:
    """Content-addressed images and their names.

        <root>/
          sha256/<hex>/             a layer (`content`), its files 0400, never changed once it has this name
          verified/<hex>            which inodes, mtimes and sizes were last hashed and found right
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

    def __init__(self, root: Path, *, shared: bool | None = None, work: Path | None = None) -> None:
        """`shared`: on a file system that is reached over a network, for several nodes. None: when `root` is a link.

        `work`: where layers of a shared store are made, on a disk of this host. None: beside `root`.
        """
        self.root = root
        self.shared = root.is_symlink() if shared is None else shared
        self._layers, self.catalog = root / "sha256", Catalog(root / "names")
        self._verified, self._tmp = root / "verified", root / "tmp"
        self._stacks, self.converted, self.pulling = root / "stacks", root / "converted", root / "pulling"
        self._work = (work or root.parent / "cache/work") if self.shared else self._tmp
        self.unused, self.prefetch = root / "unused", root / "prefetch"
        every = (
            root,
            self._layers,
            self.catalog.root,
            self._verified,
            self._tmp,
            self._work,
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
        """A fresh directory to make layers in, on a disk of this host, removed afterwards."""
        with workplace.temporary(self._work) as path:
            yield path

    def sweep(self) -> None:
        """Remove work of processes that are gone; of those on other hosts, what is a day old."""
        for entry in (*os.scandir(self._tmp), *os.scandir(self._work)):
            if workplace.abandoned(entry):
                shutil.rmtree(entry.path, ignore_errors=True)

    def add(
        self, made: Path, name: str, *, source: str = "", kind: str = "", provenance: Provenance | None = None
    ) -> Layer:
        """Take over a layer that `erofs.build` made in a `temporary` directory, under the next version of `name`."""
        check_name(name, "name")
        content = contents.read(made)
        digest, size = content.digest, content.used
        with flock(self.root / "lock", fcntl.LOCK_SH), self.catalog.locked(name):
            path = self._place(made, content)
            wanted = NameEntry(name=name, digest=digest, size=size, source=source, kind=kind, provenance=provenance)
            entry = self.catalog.add(wanted)
        return Layer(digest, path, size, name, entry.version, entry.reference)

    def add_stack(
        self,
        made: Mapping[str, Path],
        stack: StackFile,
        name: str,
        *,
        source: str,
        kind: str,
        manifest: str = "",
        provenance: Provenance | None = None,
    ) -> NameEntry:
        """Take over the new layers of a stack, by digest, under the next version of `name`: of an image its reference.

        Layers of the stack that are not in `made` must be in the store: `CreateFailed` when one was removed meanwhile.
        """
        refs.parse(name, "name")
        document = msgspec.json.format(msgspec.json.encode(stack, order="deterministic"))
        digest = "sha256:" + hashlib.sha256(document).hexdigest()
        with flock(self.root / "lock", fcntl.LOCK_SH), self.catalog.locked(name):
            for layer in made.values():
                self._place(layer, contents.read(layer))
            if gone := [layer for layer in stack.layers if not self.layer_path(layer).exists()]:
                raise CreateFailed(f"layer {gone[0]} was removed meanwhile", hint="import again", phase="convert")
            write(self._stacks / f"{refs.hex_of(digest)}.json", document)
            size = sum(self.size(layer) for layer in stack.layers)
            entry = NameEntry(name=name, digest=digest, size=size, source=source, kind=kind, manifest=manifest)
            return self.catalog.add(msgspec.structs.replace(entry, provenance=provenance))

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

    def _place(self, made: Path, content: Content) -> Path:
        path = self.layer_path(content.digest)
        with workplace.temporary(self._tmp) as near:
            if not _intact(path, content):
                with workplace.roomy(self.root):
                    ready = made if self._tmp == self._work else Path(shutil.copytree(made, near / "layer"))
                    contents.settle(ready)
                with suppress(FileNotFoundError):
                    os.rename(path, near / "damaged")
                with _unless_there():
                    os.rename(ready, path)
                sync(path.parent)
            if made.exists():
                shutil.rmtree(made)
        return path

    def layer_path(self, digest: str) -> Path:
        """The directory of a layer, or where it would be."""
        return self._layers / refs.hex_of(digest)

    def size(self, digest: str) -> int:
        """Bytes that a layer takes. `FileNotFoundError`, `LayerCorrupt`."""
        return contents.read(self.layer_path(digest), digest).used

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
        path = self.layer_path(digest)
        try:
            return Layer(digest, path, self.size(digest), name, version, reference)
        except FileNotFoundError as error:
            if not name:
                raise EnvironmentNotFound(f"no layer {ref}", hint="`barchan env ls` lists what is here") from error
            raise LayerCorrupt(f"{ref}: its layer {digest} is missing", hint=REMEDY, phase="resolve") from error

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

    def intact(self, digest: str) -> bool:
        """Whether all layers of an image are there, and none is marked as damaged."""
        return all(self._size_at_most(layer) > 0 for layer in self.layers_of(digest))

    def sizes(self) -> dict[str, int]:
        """Bytes of every layer, by digest."""
        return {digest: self._size_at_most(digest) for digest in self.digests()}

    def digests(self) -> frozenset[str]:
        """Of every layer."""
        return frozenset(f"sha256:{name}" for name in os.listdir(self._layers))

    def _size_at_most(self, digest: str) -> int:
        """0 for one that does not say, or is being removed."""
        try:
            return self.size(digest)
        except (LayerCorrupt, OSError):
            return 0

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
        with workplace.temporary(self._tmp) as near, suppress(FileNotFoundError):
            os.rename(self.layer_path(digest), near / "unused")

    def discard_leftovers(self) -> None:
        """What speaks of images and layers that are gone."""
        named = self.catalog.digests()
        kept = {refs.hex_of(digest) for digest in self.digests()}
        for document in self._stacks.glob("*.json"):
            if f"sha256:{document.stem}" not in named:
                document.unlink(missing_ok=True)
        for record in (*self.converted.glob("*/*.json"), *self.prefetch.glob("*.json")):
            if record.stem not in kept:
                record.unlink(missing_ok=True)

    def check(self, layer: Layer) -> Content:
        """Before a mount: whether all is there, and the whole content unless these very files were hashed before.

        Of a shared store the content is not read: it is what a mount is to avoid.
        """
        try:
            content = contents.read(layer.path, layer.digest)
            if self.shared and contents.whole(layer.path, content):
                return content
            known = msgspec.json.decode(self._stamp(layer.digest).read_bytes(), type=dict[str, _Stamp])
            if known == _stamps_of(layer.path, content):
                return content
        except (FileNotFoundError, msgspec.DecodeError):
            pass
        return self.verify(layer.digest)

    def verify(self, digest: str, pace: Pace = contents.unpaced) -> Content:
        """Read the whole layer and compare. `LayerCorrupt` names the digest and the remedy."""
        path = self.layer_path(digest)
        stamp = self._stamp(digest)
        try:
            before = _stamps_of(path, contents.read(path, digest, damaged=True))
            content = contents.verify(path, digest, pace)
        except OSError as error:
            raise contents.corrupt(digest, f"cannot be read: {error}") from error
        except LayerCorrupt:
            stamp.unlink(missing_ok=True)
            raise
        write(stamp, msgspec.json.encode(before))
        return content

    def verified(self) -> dict[str, float]:
        """When each layer was last read whole, in Unix seconds; 0 for never."""
        times = {f"sha256:{entry.name}": entry.stat().st_mtime for entry in os.scandir(self._verified)}
        return {digest: times.get(digest, 0.0) for digest in self.digests()}

    def scrub(self, digest: str, pace: Pace) -> int:
        """Read a layer whole, whatever is known of it, and mark it if it is damaged. Returns its bytes; raises as `verify`."""
        path = self.layer_path(digest)
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, str(path))
        try:
            content = self.verify(digest, pace)
        except LayerCorrupt as error:
            write(path / contents.DAMAGED, error.message.encode())
            raise
        (path / contents.DAMAGED).unlink(missing_ok=True)
        return sum(blob.size for blob in content.files.values())

    def _stamp(self, digest: str) -> Path:
        return self._verified / refs.hex_of(digest)


def _stamps_of(path: Path, content: Content) -> dict[str, _Stamp]:
    found = {name: (path / name).stat() for name in content.files}
    return {name: _Stamp(stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in found.items()}


def _intact(path: Path, content: Content) -> bool:
    """Whether this layer is there already, as far as can be seen without reading all of it."""
    try:
        return contents.read(path, content.digest) == content and contents.whole(path, content)
    except (FileNotFoundError, LayerCorrupt):
        return False


@contextmanager
def _unless_there() -> Iterator[None]:
    """Somebody else may have placed the same layer a moment ago."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
