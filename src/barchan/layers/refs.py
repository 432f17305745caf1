"""References to layers as people write them: `debian-12`, `debian-12@3`, `debian-12:stable`, `sha256:<64 hex digits>`. Pure."""

from __future__ import annotations

import msgspec

from barchan.errors import InvalidRequest
from barchan.image_refs import is_image, parse_image
from barchan.names import DIGEST, check_ref


class Ref(msgspec.Struct, frozen=True):
    """Either `digest`, or `name` with `version` or `tag` (neither is the newest); the name of an image is its reference."""

    name: str = ""
    version: str = ""
    digest: str = ""
    tag: str = ""

    def __str__(self) -> str:
        version, tag = f"@{self.version}" if self.version else "", f":{self.tag}" if self.tag else ""
        return self.digest or self.name + version + tag


def parse(text: str, field: str = "environment") -> Ref:
    """`InvalidRequest` names `field` when the text is no reference."""
    if is_image(text):
        return Ref(name=str(parse_image(text, field).unambiguous))
    check_ref(text, field)
    if text.startswith("sha256:"):
        return Ref(digest=text)
    name, _, tag = text.partition(":")
    name, _, version = name.partition("@")
    return Ref(name=name, version=version, tag=tag)


def check_digest(text: str) -> str:
    """The same digest; `InvalidRequest` when it is none."""
    if not DIGEST.fullmatch(text):
        raise InvalidRequest(f"{text!r} is not a digest", field="digest", hint="use sha256:<64 hex digits>")
    return text


def hex_of(digest: str) -> str:
    return check_digest(digest).removeprefix("sha256:")
