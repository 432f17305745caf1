"""Which field of a request msgspec refused."""

from __future__ import annotations

import msgspec


def field_of(error: msgspec.ValidationError) -> str:
    """The field that msgspec complains of: the `$.a.b` path, with the name of one that is unknown or missing."""
    text = str(error)
    name = text.partition("at `$")[2].split("`")[0].lstrip(".")
    if "unknown field" in text or "missing required field" in text:
        last = text.split("`")[1]
        return f"{name}.{last}" if name else last
    return name
