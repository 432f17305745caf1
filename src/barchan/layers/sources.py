"""From what people have (a directory, a tar, an OCI or docker image) to an environment in the store."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import msgspec

from barchan.errors import InvalidRequest, NodeStorageFull
from barchan.kernel import directories
from barchan.layers import compression, erofs, oci, untar
from barchan.layers.catalog import NameEntry
from barchan.layers.content import Format
from barchan.layers.oci_blobs import Archive, Directory, document
from barchan.layers.oci_schema import DockerImage, Platform, decode, parse_platform
from barchan.layers.oci_select import Image, docker_image, layout_image
from barchan.layers.store import Layer, LayerStore
from barchan.names import check_name

SourceType = Literal["directory", "tar", "oci", "oci-archive", "docker-archive"]
TYPES: tuple[SourceType, ...] = get_args(SourceType)
PLATFORM = "linux/amd64"
_LAYOUT, _INDEX, _DOCKER = "oci-layout", "index.json", "manifest.json"


class Wanted(msgspec.Struct, frozen=True):
    """What to take from a source. `type` None: find out. `image`: tag, name or digest, "" for the only one.

    `format` is that of the layers made of it, but for those of an image that are known from another one.
    """

    type: SourceType | None = None
    image: str = ""
    platform: str = PLATFORM
    format: Format = "split"


def import_environment(
    store: LayerStore,
    name: str,
    source: Path,
    wanted: Wanted = Wanted(),  # noqa: B008
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> NameEntry | Layer:
    """Make `source` the next version of `name`; the same content again is no new version.

    `progress` gets one line of text at a time. Raises `InvalidRequest` naming the file, blob or member at fault,
    `NodeStorageFull`, `FeatureMissing`; nothing half-made stays behind.
    """
    check_name(name, "name")
    platform = parse_platform(wanted.platform)
    store.sweep()
    with _typed(source), store.temporary() as work:
        if source.is_dir():
            return _from_directory(store, name, source, wanted, platform, progress)
        plain = _plain(source, work, progress)
        kind, archive = _archive_kind(plain, source, wanted.type)
        if archive is None:
            _check_no_image(wanted, kind)
            return _import_tree(store, name, plain, source, format=wanted.format)
        image = _image(archive, kind, wanted, platform)
        return _import_image(store, name, source, archive, image, kind, wanted, progress)


def _import_image(
    store: LayerStore,
    name: str,
    source: Path,
    parts: Archive | Directory,
    image: Image,
    kind: SourceType,
    wanted: Wanted,
    progress: Callable[[str], None],
) -> NameEntry:
    said = str(source)
    return oci.import_image(
        store,
        parts,
        image,
        name,
        source=said,
        kind=kind,
        progress=lambda step: progress(step.text),
        format=wanted.format,
    )


def _from_directory(
    store: LayerStore, name: str, source: Path, wanted: Wanted, platform: Platform, progress: Callable[[str], None]
) -> NameEntry | Layer:
    parts = Directory(source)
    kind = wanted.type or ("oci" if parts.has(_LAYOUT) and parts.has(_INDEX) else "directory")
    if kind == "oci":
        image = layout_image(parts, wanted.image, platform)
        return _import_image(store, name, source, parts, image, kind, wanted, progress)
    if kind != "directory":
        raise _not(source, "a directory", kind)
    _check_no_image(wanted, kind)
    return _import_tree(store, name, source, source, format=wanted.format)


def _plain(source: Path, work: Path, progress: Callable[[str], None]) -> Path:
    """The archive without compression."""
    if not source.is_file() or not source.stat().st_size:
        raise InvalidRequest(f"{source}: no such directory or archive", field="source", phase="resolve")
    with source.open("rb") as file:
        if not compression.compressed(file):
            return source
        progress(f"unpacking {source.name}")
        compression.unpack(file, work / "archive", str(source), phase="resolve")
    return work / "archive"


def _archive_kind(plain: Path, source: Path, wanted: SourceType | None) -> tuple[SourceType, Archive | None]:
    if wanted in ("directory", "oci"):
        raise _not(source, "an archive", wanted)
    if wanted == "tar":
        return wanted, None
    archive = Archive(plain, str(source))
    if wanted is not None:
        return wanted, archive
    if archive.has(_LAYOUT) and archive.has(_INDEX):
        return "oci-archive", archive
    if archive.has(_DOCKER) and _is_docker(archive):
        return "docker-archive", archive
    return "tar", None


def _is_docker(archive: Archive) -> bool:
    """Other trees have a file of that name too."""
    try:
        return bool(_docker_images(archive))
    except InvalidRequest:
        return False


def _docker_images(archive: Archive) -> tuple[DockerImage, ...]:
    return decode(document(archive, _DOCKER), tuple[DockerImage, ...], _DOCKER)


def _image(archive: Archive, kind: SourceType, wanted: Wanted, platform: Platform) -> Image:
    if kind == "oci-archive":
        return layout_image(archive, wanted.image, platform)
    return docker_image(archive, _docker_images(archive), wanted.image, platform)


def _not(source: Path, what: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{source} is {what}, which {wanted} is not", field="type", phase="resolve")


def _check_no_image(wanted: Wanted, kind: str) -> None:
    if wanted.image:
        raise InvalidRequest(f"{wanted.image!r}: a {kind} holds no images", field="image", phase="resolve")


def import_layer(
    store: LayerStore,
    name: str,
    source: Path,
    *,
    epoch: int | None = None,
    kind: str = "import",
    format: Format = "split",
) -> Layer:
    """Make a layer of a directory or a tar and give it the next version of `name`.

    The same content again is the same layer: no copy, no new version. `epoch` (Unix seconds) replaces later file times.
    Raises `InvalidRequest` naming the file at fault, `NodeStorageFull`; nothing half-made stays behind.
    """
    check_name(name, "name")
    with _typed(source), store.temporary() as work:
        plain = source if source.is_dir() else _plain(source, work, lambda line: None)
        return _import_tree(store, name, plain, source, epoch=epoch, kind=kind, format=format)


def _import_tree(
    store: LayerStore,
    name: str,
    tree: Path,
    source: Path,
    *,
    epoch: int | None = None,
    kind: str = "import",
    format: Format = "split",
) -> Layer:
    with store.temporary() as work:
        if not tree.is_dir():
            archive, tree = tree, work / "tree"
            directories.make(tree, 0o755)
            untar.unpack(archive, tree, str(source))
        layer = work / "layer"
        erofs.build(tree, layer, epoch=epoch, format=format)
        return store.add(layer, name, source=str(source), kind=kind)


@contextmanager
def _typed(source: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NodeStorageFull(f"no room to import {source}", hint="free disk space", phase="import") from error
        raise InvalidRequest(f"{source} cannot be imported: {error}", field="source", phase="import") from error
