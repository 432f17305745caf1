"""References to images in registries, as people write them: `docker://debian:12`, `docker://ghcr.io/o/n@sha256:…`. Pure.

Short names mean what they mean to docker: without a registry Docker Hub, there without a namespace `library`, without a
tag `latest`.
"""

from __future__ import annotations

import re

import msgspec

from barchan.errors import InvalidRequest

SCHEME = "docker://"
HINT = "for example docker://debian:12 or docker://ghcr.io/owner/name@sha256:<64 hex digits>"
_HUB, _OFFICIAL = "docker.io", "library"
_HOST = r"(?:[a-z0-9]+(?:[.-]+[a-z0-9]+)*|\[[0-9a-f:]{2,45}\])(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_TAG, _DIGEST = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", r"sha256:[0-9a-f]{64}"
_REFERENCE = rf"(?:({_HOST})/)?({_PART}(?:/{_PART})*)(?::({_TAG}))?(?:@({_DIGEST}))?"
"""Groups: registry, repository, tag, digest. What looks like a registry and is none is a valid part of a repository."""
_PARSED = re.compile(SCHEME + _REFERENCE)
PATTERN = rf"{SCHEME}(?=[^@]{{1,225}}(?:@|$)){_REFERENCE}"
"""What callers may write: 225 characters before the digest. What it is completed to (`docker.io/library/`) may be longer."""


class ImageRef(msgspec.Struct, frozen=True):
    """Where an image is. A digest says which one it is, whatever the tag has come to mean."""

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        """The whole of it, as `parse_image` reads it."""
        tag, digest = f":{self.tag}" if self.tag else "", f"@{self.digest}" if self.digest else ""
        return f"{SCHEME}{self.registry}/{self.repository}{tag}{digest}"

    @property
    def unambiguous(self) -> ImageRef:
        """Of tag and digest only one, as a digest says all."""
        return msgspec.structs.replace(self, tag="") if self.digest else self

    def pinned(self, digest: str) -> ImageRef:
        """The image that has this digest."""
        return msgspec.structs.replace(self, tag="", digest=digest)


def is_image(text: str) -> bool:
    return text.startswith(SCHEME)


def parse_image(text: str, field: str = "environment") -> ImageRef:
    """`InvalidRequest` names `field` when the text is no reference."""
    found = _PARSED.fullmatch(text)
    if not found:
        raise InvalidRequest(f"{field}: {text!r} is not a reference of an image", field=field, hint=HINT)
    registry, repository = _split(found[1], found[2])
    tag, digest = found[3] or "", found[4] or ""
    return ImageRef(registry, repository, tag or ("" if digest else "latest"), digest)


def _split(registry: str | None, repository: str) -> tuple[str, str]:
    """The first part is a registry only if it looks like one: `owner/name` is on Docker Hub."""
    if registry and not (set(".:[") & set(registry) or registry == "localhost"):
        registry, repository = None, f"{registry}/{repository}"
    if registry in (None, "index.docker.io", _HUB):
        registry = _HUB
        repository = repository if "/" in repository else f"{_OFFICIAL}/{repository}"
    return registry or _HUB, repository
