"""Names that callers and administrators choose, checked on their way in."""

from __future__ import annotations

import re

from barchan.errors import InvalidRequest
from barchan.image_refs import HINT, PATTERN, is_image

NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
REF = re.compile(
    rf"(?!sha256:)(?:{NAME.pattern})(?:@(?:[0-9]{{1,9}}|[a-z][a-z0-9._-]{{0,62}})|:{NAME.pattern})?|{DIGEST.pattern}"
)
"""After `@` comes what never changes, after `:` what may be moved."""
_IMAGE = re.compile(PATTERN)
BUILD_STEP = re.compile(r"build-[0-9a-f]{40}")
"""Names under which builds keep what a step made. They come and go by themselves."""
SCRATCH = f"build-{'0' * 40}"
"""One of them: nothing at all."""


def check_name(value: str, field: str) -> str:
    """A name of a layer, node, data mount or label key. `..` and path separators cannot occur in one."""
    if not NAME.fullmatch(value) or ".." in value:
        raise InvalidRequest(
            f"{field}: {value!r} is not a name",
            field=field,
            hint="use a-z, 0-9, '.', '_', '-', at most 64 characters, no '..'",
        )
    return value


def check_ref(value: str, field: str) -> str:
    """Of an environment, or of an image in a registry."""
    if is_image(value):
        if not _IMAGE.fullmatch(value):
            raise InvalidRequest(f"{field}: {value!r} is not a reference of an image", field=field, hint=HINT)
        return value
    if not REF.fullmatch(value) or ".." in value:
        raise InvalidRequest(
            f"{field}: {value!r} is not an environment reference",
            field=field,
            hint="use name, name@version, name:tag, sha256:<64 hex digits> or docker://REGISTRY/NAME:TAG",
        )
    return value
