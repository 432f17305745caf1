"""An environment as an archive that other tools load. The same layers and options give the same bytes."""

from __future__ import annotations

import hashlib
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from barchan.errors import FileIsDirectory, InvalidRequest
from barchan.image_refs import SCHEME, is_image, parse_image
from barchan.images import ImageConfig
from barchan.layers import refs
from barchan.layers.blobs import Blob, Compression, Output, make, typed
from barchan.layers.catalog import sync
from barchan.layers.oci_blobs import blob_name
from barchan.layers.oci_schema import Platform
from barchan.layers.store import Layer, LayerStore
from barchan.layers.tar_writer import LayerTar, Sink, header, padding
from barchan.layers.view import View, opened, stack_of

Format = Literal["oci", "docker", "tar"]
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_SUFFIX: Mapping[Compression, str] = {"none": "", "gzip": "+gzip", "zstd": "+zstd"}
_USUAL: Mapping[Format, Compression] = {"oci": "gzip", "docker": "none", "tar": "none"}
_PIECE = 1 << 20
_YEAR_9999 = 253_402_300_799


class Wanted(msgspec.Struct, frozen=True):
    """`flat`: one layer, which holds what a sandbox would see; a `tar` is always that layer alone. `compression` None: gzip for
    `oci`, none otherwise. `tag` "": from the reference. `platform`: the store does not know what programs are made for."""

    format: Format = "oci"
    flat: bool = False
    compression: Compression | None = None
    tag: str = ""
    platform: Platform = Platform("linux", "amd64")


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """`digest`: of the manifest of `oci`, of the configuration of `docker`, of the `tar` itself. `layers`: digests of their uncompressed
    tars, bottom first. `left_out`: extended attributes that tar cannot hold. `size` in bytes."""

    digest: str
    layers: tuple[str, ...]
    size: int
    left_out: int = 0


def export(
    store: LayerStore,
    ref: str,
    out: Output,
    wanted: Wanted = Wanted(),  # noqa: B008
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> Exported:
    """Write an environment to `out`, from the start to the end. One layer at a time takes room in the store meanwhile.

    Raises `InvalidRequest` for what the format cannot hold, `LayerCorrupt`, `NodeStorageFull`, `FeatureMissing` without zstd.
    """
    way = wanted.compression or _USUAL[wanted.format]
    if wanted.format == "docker" and way == "zstd":
        raise InvalidRequest("compress: docker archives are not read with zstd", field="compress", hint="use gzip")
    image = store.resolve(ref)
    tag = _tag(wanted.tag, image)
    with store.temporary() as work, opened(store, stack_of(image)) as below:
        stack = View(below)
        views = [stack] if wanted.flat or wanted.format == "tar" else list(stack.layers())[::-1]
        layers = _Layers(work, way, progress)
        if wanted.format == "tar":
            return _tar(layers, views[0], out)
        archive = _Archive(out)
        names = _docker_name if wanted.format == "docker" else _blob_name
        blobs = [archive.add(layers.made(one, f"layer {n} of {len(views)}"), names) for n, one in enumerate(views, 1)]
        config = _config(image.config, wanted.platform, blobs, layers.times)
        finish = _docker if wanted.format == "docker" else _oci
        digest = finish(archive, config, blobs, tag, f"{_LAYER}{_SUFFIX[way]}")
        archive.end()
    diff_ids = tuple(blob.diff_id for blob in blobs)
    return Exported(digest=digest, layers=diff_ids, size=out.size, left_out=layers.left_out)


def _tag(given: str, image: Layer) -> str:
    """A name as docker writes it; "" when there is none."""
    if given:
        found = parse_image(SCHEME + given, "tag")
        if found.digest:
            raise InvalidRequest(f"tag: {given!r} has a digest", field="tag")
        return str(found).removeprefix(SCHEME)
    if is_image(image.name):
        found = parse_image(image.name)
        return "" if found.digest else str(found).removeprefix(SCHEME)
    return f"localhost/{image.name}:{image.version}" if image.name else ""


class _Layers:
    """Their tars, one at a time in `work`. `times`: of the newest file of each, in ns."""

    def __init__(self, work: Path, way: Compression, progress: Callable[[str], None]) -> None:
        self._work, self._way, self._progress = work, way, progress
        self.times: list[int] = []
        self.left_out = 0

    def made(self, view: View, shown: str) -> Blob:
        self._progress(f"{shown}: writing")
        return make(self._work / f"{len(self.times)}", self._way, shown, lambda out: self._fill(out, view))

    def _fill(self, out: Sink, view: View) -> None:
        tar = LayerTar(out, view)
        tar.run()
        self.times.append(tar.newest)
        self.left_out += tar.left_out


def _tar(layers: _Layers, view: View, out: Output) -> Exported:
    blob = layers.made(view, "tar")
    _copy(blob, out)
    return Exported(digest=blob.digest, layers=(blob.diff_id,), size=out.size, left_out=layers.left_out)


class _Archive:
    """A tar of documents and blobs, as it is written. A blob's own file is removed once it is in it."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._names: set[str] = set()

    def add(self, blob: Blob, named: Callable[[Blob], str]) -> Blob:
        if self._begin(named(blob), blob.size):
            _copy(blob, self._out)
            self._out.write(padding(blob.size))
        blob.path.unlink()
        return blob

    def document(self, name: str, data: bytes) -> str:
        """Its digest."""
        if self._begin(name, len(data)):
            self._out.write(data + padding(len(data)))
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    def _begin(self, name: str, size: int) -> bool:
        """Whether it is not there yet: two layers may be equal."""
        if name in self._names:
            return False
        self._names.add(name)
        info = tarfile.TarInfo(name)
        info.size = size
        self._out.write(header(info))
        return True

    def end(self) -> None:
        self._out.write(bytes(2 * tarfile.BLOCKSIZE))
        self._out.flush()


def _copy(blob: Blob, out: Output) -> None:
    with blob.path.open("rb") as file:
        while piece := file.read(_PIECE):
            out.write(piece)


def _blob_name(blob: Blob) -> str:
    return blob_name(blob.digest)


def _docker_name(blob: Blob) -> str:
    return f"{refs.hex_of(blob.diff_id)}.tar"


def _oci(archive: _Archive, config: bytes, blobs: Sequence[Blob], tag: str, media_type: str) -> str:
    """The documents of an OCI layout; the digest of the manifest."""
    settings = _descriptor(archive, _CONFIG, config)
    layers = [{"mediaType": media_type, "digest": blob.digest, "size": blob.size} for blob in blobs]
    manifest = _json({"schemaVersion": 2, "mediaType": _MANIFEST, "config": settings, "layers": layers})
    found = _descriptor(archive, _MANIFEST, manifest)
    names = {"io.containerd.image.name": tag, "org.opencontainers.image.ref.name": tag}
    archive.document(
        "index.json", _json({"schemaVersion": 2, "manifests": [{**found, **({"annotations": names} if tag else {})}]})
    )
    archive.document("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    return str(found["digest"])


def _descriptor(archive: _Archive, media_type: str, data: bytes) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    archive.document(blob_name(digest), data)
    return {"mediaType": media_type, "digest": digest, "size": len(data)}


def _docker(archive: _Archive, config: bytes, blobs: Sequence[Blob], tag: str, media_type: str) -> str:
    """What `docker save` wrote before version 25, and every version loads; the digest of the configuration."""
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    digest = archive.document(name, config)
    image = {"Config": name, "RepoTags": [tag] if tag else [], "Layers": [_docker_name(blob) for blob in blobs]}
    archive.document("manifest.json", _json([image]))
    return digest


def _config(config: ImageConfig, platform: Platform, blobs: Sequence[Blob], times: Sequence[int]) -> bytes:
    """Its times are those of the newest files: they depend on nothing else than the layers."""
    process = {
        "Env": [f"{key}={value}" for key, value in config.env.items()],
        "User": config.user,
        "WorkingDir": config.workdir,
        "Entrypoint": config.entrypoint,
        "Cmd": config.command,
        "Labels": config.labels,
    }
    return _json(
        {
            "created": _moment(max(times)),
            "os": platform.os,
            "architecture": platform.architecture,
            **({"variant": platform.variant} if platform.variant else {}),
            "config": {key: value for key, value in process.items() if value},
            "rootfs": {"type": "layers", "diff_ids": [blob.diff_id for blob in blobs]},
            "history": [{"created": _moment(at), "created_by": "barchan layer export"} for at in times],
        }
    )


def _moment(ns: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(min(max(ns // 10**9, 0), _YEAR_9999)))


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


@contextmanager
def file_at(target: Path) -> Iterator[Output]:
    """A file that appears under its name when it is whole and on disk. An ordinary one that is there is replaced."""
    if target.is_dir():
        raise FileIsDirectory(f"{target} is a directory", hint="name a file")
    if target.exists() and not target.is_file():
        raise InvalidRequest(f"{target} is no ordinary file", field="file", hint="'-' is standard output")
    part, shown = target.with_name(f".{target.name}.{os.getpid()}"), str(target)
    with typed(shown):
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            yield Output(file, shown)
            with typed(shown):
                file.flush()
                os.fsync(file.fileno())
        with typed(shown):
            os.replace(part, target)
            sync(target.absolute().parent)
    finally:
        part.unlink(missing_ok=True)
