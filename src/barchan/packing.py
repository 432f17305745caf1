"""What of a sandbox's changes becomes a layer, and what came of it: values that cross layers. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from barchan.errors import InvalidRequest
from barchan.images import ImageConfig, check_config
from barchan.names import check_name
from barchan.spec import SandboxId

RuleName = Literal["histories", "temporary", "runtime", "logs", "caches", "credentials", "identity"]
MOST_PATTERN, MOST_PATTERNS = 4095, 1000
"""Characters of one, and how many."""


class ScrubRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes to what is left out of a packed layer: docs/reference/scrub-policy.md."""

    also: tuple[str, ...] = ()
    """Patterns of more paths to leave out, from the sandbox's root without a slash in front: `srv/cache/*`."""
    keep: tuple[RuleName, ...] = ()
    """Rules that are switched off."""


class PackOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to make of a sandbox's changes."""

    name: str
    """Of what is made; its next version."""
    whole: bool = False
    """The name stands for all layers of the sandbox with the changes on top; otherwise for the changes alone."""
    scrub: ScrubRules = ScrubRules()
    config: ImageConfig | None = None
    """Of the image, when `whole`; None: as that of the sandbox's environment."""


class PackedLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sandbox's changes became."""

    name: str
    version: int
    reference: str
    """`name@version`: always means this."""
    digest: str
    """Of what the name stands for; usable in its place."""
    layer: str
    """Digest of the layer of the changes; the same as `digest` unless it was packed whole. Whole and without changes: of the topmost."""
    layers: int
    """How many the name stands for."""
    sandbox: SandboxId
    size: int
    """Bytes that the layer of the changes takes in the store."""
    content: int = 0
    """Bytes of its files."""
    entries: int = 0
    """Files, directories, links and removals in it."""
    left_out: dict[str, int] = {}
    """How many of them were left out, by rule of the scrub policy; those of `also` as `extra`. A directory counts once."""
    renamed: int = 0
    """Directories of the layers below that were renamed: they were copied whole."""
    completed: int = 0
    """Files of which only attributes had changed: their content was copied from the layers below."""


def check_order(order: PackOrder) -> PackOrder:
    """Refuse what the types let through. Returns the same value."""
    check_name(order.name, "name")
    if len(order.scrub.also) > MOST_PATTERNS:
        raise InvalidRequest(
            f"scrub.also: {len(order.scrub.also)} patterns, at most {MOST_PATTERNS}", field="scrub.also"
        )
    for pattern in order.scrub.also:
        check_pattern(pattern, "scrub.also")
    if order.config is None:
        return order
    if not order.whole:
        raise InvalidRequest("config: changes alone are no image", field="config", hint="pack it whole")
    try:
        check_config(order.config)
    except InvalidRequest as error:
        raise InvalidRequest(f"config.{error.message}", field=f"config.{error.field}", hint=error.hint) from None
    return order


def check_pattern(pattern: str, field: str) -> None:
    """Raises `InvalidRequest` for one that can match nothing."""
    parts = pattern.split("/")
    wrong = any(part in ("", ".", "..") for part in parts) or "\0" in pattern or len(pattern) > MOST_PATTERN
    misplaced = any("**" in part and (part != "**" or 0 < at < len(parts) - 1) for at, part in enumerate(parts))
    if wrong or misplaced or pattern in ("**", "~"):
        raise InvalidRequest(
            f"{field}: {pattern[:80]!r} is no pattern of paths",
            field=field,
            hint="a path from the root without a slash in front, such as `srv/cache/*`; `**` only first or last",
        )
