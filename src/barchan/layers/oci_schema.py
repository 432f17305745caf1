"""The documents of an OCI image, and of what `docker save` writes, as far as they are used here. Pure.

Types, sizes and digests are strict. Unknown fields are ignored: the specification demands it.
"""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Literal, TypeVar

import msgspec

from barchan.errors import InvalidRequest
from barchan.images import ImageConfig, check_config

MOST_LAYERS = 500
_COUNT = msgspec.Meta(max_length=10_000)
_Digest = Annotated[str, msgspec.Meta(pattern=r"^(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$")]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Text = Annotated[str, msgspec.Meta(max_length=64 << 10)]

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_LAYER = re.compile(
    r"application/vnd\.oci\.image\.layer\.(?:nondistributable\.)?v1\.tar(?:\+gzip|\+zstd)?"
    r"|application/vnd\.docker\.image\.rootfs\.(?:foreign\.)?diff\.tar(?:\.gzip|\.zstd)?"
)
T = TypeVar("T")


class Platform(msgspec.Struct, frozen=True):
    os: str = ""
    architecture: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)

    def fits(self, wanted: Platform) -> bool:
        """A variant matters only if one is asked for."""
        same = (self.os, self.architecture) == (wanted.os, wanted.architecture)
        return same and wanted.variant in ("", self.variant)


class Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    """A reference to a blob."""

    media_type: _Text
    digest: _Digest
    size: _Size
    platform: Platform | None = None
    annotations: dict[str, str] = {}


class LayoutFile(msgspec.Struct, frozen=True, rename="camel"):
    image_layout_version: str


class Index(msgspec.Struct, frozen=True, rename="camel"):
    manifests: Annotated[tuple[Descriptor, ...], _COUNT]
    schema_version: Literal[2] = 2


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], msgspec.Meta(max_length=MOST_LAYERS)]
    schema_version: Literal[2] = 2


class _Process(msgspec.Struct, frozen=True, rename="pascal"):
    env: tuple[_Text, ...] | None = None
    working_dir: _Text | None = None
    user: _Text | None = None
    entrypoint: tuple[_Text, ...] | None = None
    cmd: tuple[_Text, ...] | None = None
    labels: dict[str, str] | None = None


class _RootFs(msgspec.Struct, frozen=True):
    diff_ids: Annotated[tuple[_Digest, ...], msgspec.Meta(max_length=MOST_LAYERS)]
    type: str = "layers"


class Config(msgspec.Struct, frozen=True):
    rootfs: _RootFs
    os: str = "linux"
    architecture: str = ""
    variant: str = ""
    config: _Process | None = None


class DockerImage(msgspec.Struct, frozen=True, rename="pascal"):
    """One image of the manifest.json of `docker save`. `config` and `layers` are names in the archive."""

    config: _Text
    layers: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MOST_LAYERS)]
    repo_tags: tuple[_Text, ...] | None = None


def decode(data: bytes, kind: type[T], shown: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise wrong(f"{shown} is not as the specification of OCI images says: {error}") from error


def config_of(config: Config) -> ImageConfig:
    """What the image says, checked as if a caller had said it. Names of variables that no program could read are left out."""
    process = config.config or _Process()
    pairs = (item.partition("=") for item in process.env or ())
    found = ImageConfig(
        env={key: value for key, _, value in pairs if key},
        user=process.user or "",
        workdir=posixpath.join("/", process.working_dir) if process.working_dir else "",
        entrypoint=process.entrypoint or (),
        command=process.cmd or (),
        labels=process.labels or {},
    )
    try:
        return check_config(found)
    except InvalidRequest as error:
        raise wrong(f"the image's configuration cannot be used: {error.message}") from error


def parse_platform(text: str) -> Platform:
    """`os/architecture` or `os/architecture/variant`."""
    parts = text.split("/")
    if not 2 <= len(parts) <= 3 or not all(re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,31}", part) for part in parts):
        raise InvalidRequest(f"{text!r} is not a platform", field="platform", hint="for example linux/amd64")
    return Platform(*parts)


def check_layer_type(media_type: str) -> None:
    if not _LAYER.fullmatch(media_type):
        raise wrong(f"{media_type!r} is no type of layer that is known here")


def wrong(message: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(message, field="source", phase="resolve", hint=hint)
