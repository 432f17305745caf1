"""OCI and docker images, written byte by byte as a stranger may write them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

EPOCH = 1_600_000_000
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
TAR = "application/vnd.oci.image.layer.v1.tar"
Member = tuple[tarfile.TarInfo, bytes]


def file(name: str, content: bytes = b"", **fields: Any) -> Member:
    """A member of a tar, by default a regular file."""
    info = tarfile.TarInfo(name)
    info.mtime, info.size = EPOCH, len(content)
    xattrs = fields.pop("xattrs", {})
    info.pax_headers = {f"SCHILY.xattr.{k}": v.decode("utf-8", "surrogateescape") for k, v in xattrs.items()}
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def folder(name: str, mode: int = 0o755, **fields: Any) -> Member:
    return file(name, type=tarfile.DIRTYPE, mode=mode, **fields)


def symlink(name: str, target: str, **fields: Any) -> Member:
    return file(name, type=tarfile.SYMTYPE, linkname=target, mode=0o777, **fields)


def hardlink(name: str, target: str, **fields: Any) -> Member:
    return file(name, type=tarfile.LNKTYPE, linkname=target, **fields)


def tar(members: Iterable[Member], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def packed(layer: bytes, way: str) -> tuple[bytes, str]:
    """The blob of a layer and its media type."""
    if way == "gzip":
        return gzip.compress(layer, 1, mtime=0), f"{TAR}+gzip"
    if way == "zstd":
        return subprocess.run(["zstd", "-qc"], input=layer, capture_output=True, check=True).stdout, f"{TAR}+zstd"
    return layer, TAR


class Layout:
    """An image layout in a directory, growing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs/sha256").mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.entries: list[dict[str, Any]] = []
        self.index()

    def blob(self, data: bytes, kind: str, **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data), **more}

    def json(self, value: Any, kind: str, **more: Any) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), kind, **more)

    def manifest(
        self, layers: Sequence[bytes], *, way: str = "gzip", config: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        """The descriptor of an image; `config` and `more` go over what is usual."""
        diffs = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        usual = {"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": diffs}}
        blobs = [self.blob(*packed(layer, way)) for layer in layers]
        settings = self.json({**usual, "config": {}, **(config or {})}, CONFIG)
        value = {"schemaVersion": 2, "mediaType": MANIFEST, "config": settings, "layers": blobs}
        return self.json(value, MANIFEST, **more)

    def add(self, tag: str, layers: Sequence[bytes], **more: Any) -> dict[str, Any]:
        entry = self.manifest(layers, **more)
        if tag:
            entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
        self.entries.append(entry)
        self.index()
        return entry

    def index(self) -> None:
        (self.root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.entries}))

    def archive(self, path: Path, mode: Any = "w") -> Path:
        with tarfile.open(path, mode) as out:
            for name in sorted(os.listdir(self.root)):
                out.add(self.root / name, name)
        return path


def docker_archive(path: Path, layers: Sequence[bytes], tags: Sequence[str] = ("image:1",)) -> Path:
    """As `docker save` wrote it before version 25: a layer that occurs again is a link to the first."""
    diffs = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    config = json.dumps({"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": diffs}})
    config_name = hashlib.sha256(config.encode()).hexdigest() + ".json"
    names = [f"{number:064}/layer.tar" for number in range(len(layers))]
    first = {layer: name for name, layer in zip(reversed(names), reversed(layers), strict=True)}
    members = [file(config_name, config.encode())]
    for name, layer in zip(names, layers, strict=True):
        members.append(file(name, layer) if first[layer] == name else symlink(name, f"../{first[layer]}"))
    manifest = [{"Config": config_name, "RepoTags": list(tags), "Layers": names}]
    members.append(file("manifest.json", json.dumps(manifest).encode()))
    path.write_bytes(tar(members))
    return path
