"""Which image of a layout or archive is meant: by tag, by platform. What was chosen, as one value."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

import msgspec

from barchan.images import ImageConfig
from barchan.layers.oci_blobs import Parts, document, verified_document
from barchan.layers.oci_schema import (
    INDEXES,
    MANIFESTS,
    Config,
    Descriptor,
    DockerImage,
    Index,
    LayoutFile,
    Manifest,
    Platform,
    check_layer_type,
    config_of,
    decode,
    wrong,
)

_DEEPEST = 4
_CONFIG_NAME = re.compile(r"(?:^|/)([0-9a-f]{64})(?:\.json)?$")
_NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_ATTESTATION = "vnd.docker.reference.type"


class LayerPart(msgspec.Struct, frozen=True):
    """One layer: its uncompressed digest, and where it is: a blob, or a name in a docker archive."""

    diff_id: str
    blob: Descriptor | None = None
    name: str = ""


class Image(msgspec.Struct, frozen=True):
    """Layers from the bottom to the top."""

    layers: tuple[LayerPart, ...]
    config: ImageConfig


def layout_image(parts: Parts, tag: str, platform: Platform) -> Image:
    """Of an OCI layout. `tag` "" means the only one."""
    version = decode(document(parts, "oci-layout"), LayoutFile, "oci-layout").image_layout_version
    if not version.startswith("1."):
        raise wrong(f"the layout is of version {version!r}; known is 1")
    index = decode(document(parts, "index.json"), Index, "index.json")
    found = [entry for entry in index.manifests if not _unknown(entry)]
    chosen = _manifest(parts, _named(found, tag), platform)
    manifest = decode(verified_document(parts, chosen), Manifest, f"manifest {chosen.digest}")
    config = decode(verified_document(parts, manifest.config), Config, f"config {manifest.config.digest}")
    return image_of(manifest, config, platform)


def image_of(manifest: Manifest, config: Config, platform: Platform) -> Image:
    """What a manifest and its configuration mean together."""
    for layer in manifest.layers:
        check_layer_type(layer.media_type)
    _check_config(config, len(manifest.layers), platform)
    pairs = zip(config.rootfs.diff_ids, manifest.layers, strict=True)
    return Image(tuple(LayerPart(diff_id, blob) for diff_id, blob in pairs), config_of(config))


def _unknown(entry: Descriptor) -> bool:
    """Not an image: build attestations and the like."""
    known = entry.media_type in (*INDEXES, *MANIFESTS)
    return not known or _ATTESTATION in entry.annotations or (entry.platform or Platform()).os == "unknown"


def names_of(entry: Descriptor) -> tuple[str, ...]:
    return (*(entry.annotations[key] for key in _NAMES if key in entry.annotations), entry.digest)


def _named(entries: Sequence[Descriptor], tag: str) -> list[Descriptor]:
    found = [entry for entry in entries if not tag or tag in names_of(entry)]
    if not found:
        known = ", ".join(sorted({name for entry in entries for name in names_of(entry)[:1]})[:10])
        raise wrong(f"there is no image {tag!r}" if tag else "there is no image in it", known and f"known: {known}")
    return found


def _manifest(parts: Parts, entries: Sequence[Descriptor], platform: Platform, depth: int = 0) -> Descriptor:
    """Down through indexes to the one manifest for the platform."""
    chosen = _only(_fitting(entries, platform), platform)
    if chosen.media_type in MANIFESTS:
        return chosen
    if depth == _DEEPEST:
        raise wrong(f"indexes are nested more than {_DEEPEST} deep")
    index = decode(verified_document(parts, chosen), Index, f"index {chosen.digest}")
    return _manifest(parts, [entry for entry in index.manifests if not _unknown(entry)], platform, depth + 1)


def _fitting(entries: Iterable[Descriptor], platform: Platform) -> dict[str, Descriptor]:
    return {entry.digest: entry for entry in entries if entry.platform is None or entry.platform.fits(platform)} or (
        _none_fits(entries, platform)
    )


def _none_fits(entries: Iterable[Descriptor], platform: Platform) -> dict[str, Descriptor]:
    known = ", ".join(sorted({str(entry.platform) for entry in entries})[:10])
    raise wrong(f"there is no image for {platform}", f"choose with --platform; there are: {known}" if known else "")


def _only(found: dict[str, Descriptor], platform: Platform) -> Descriptor:
    if len(found) > 1:
        known = ", ".join(sorted(names_of(entry)[0] for entry in found.values())[:10])
        raise wrong(f"there are {len(found)} images for {platform}", f"choose one with --image: {known}")
    return next(iter(found.values()))


def _check_config(config: Config, layers: int, platform: Platform) -> None:
    if len(config.rootfs.diff_ids) != layers:
        raise wrong(f"the image has {layers} layers and {len(config.rootfs.diff_ids)} diff ids")
    if not layers:
        raise wrong("the image has no layers")
    own = Platform(config.os, config.architecture or platform.architecture, config.variant)
    if (own.os, own.architecture) != (platform.os, platform.architecture):
        raise wrong(f"the image is for {own}, not for {platform}", f"`--platform {own}` takes it as it is")


def docker_image(parts: Parts, images: Sequence[DockerImage], tag: str, platform: Platform) -> Image:
    """Of what older versions of `docker save` write. There layers carry no digest but that of their content."""
    found = [image for image in images if not tag or tag in docker_names(image)]
    if len(found) != 1:
        known = ", ".join(name for image in images for name in docker_names(image)[:1])
        raise wrong(
            f"there is no image {tag!r}" if not found else f"there are {len(found)} images",
            f"choose one with --image: {known}",
        )
    image = found[0]
    config = decode(_docker_config(parts, image.config), Config, f"config {image.config!r}")
    _check_config(config, len(image.layers), platform)
    pairs = zip(config.rootfs.diff_ids, image.layers, strict=True)
    return Image(tuple(LayerPart(diff_id, name=name) for diff_id, name in pairs), config_of(config))


def _docker_config(parts: Parts, name: str) -> bytes:
    """Its name is its digest, though nothing demands it."""
    data = document(parts, name)
    wanted = _CONFIG_NAME.search(name)
    if wanted and wanted[1] != (found := hashlib.sha256(data).hexdigest()):
        raise wrong(f"config {name!r} is damaged: it hashes to {found}")
    return data


def docker_names(image: DockerImage) -> tuple[str, ...]:
    return (*(image.repo_tags or ()), image.config)
