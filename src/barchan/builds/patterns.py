"""Names with wildcards, as Go's filepath.Match reads them: `*` and `?` within one name, `[a-z]`, `[^a]`, `\\` before any of them.
Pure."""

from __future__ import annotations

import functools
import re

_WILD = re.compile(r"[*?\[\\]")


def is_wild(name: str) -> bool:
    return bool(_WILD.search(name))


@functools.lru_cache(maxsize=256)
def compiled(name: str) -> re.Pattern[str]:
    """Of one part of a path. Raises `ValueError` for what is no pattern."""
    out, at = "", 0
    while at < len(name):
        char = name[at]
        at += 1
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "\\":
            if at == len(name):
                raise ValueError(f"{name!r} ends with a backslash")
            out += re.escape(name[at])
            at += 1
        elif char == "[":
            piece, at = _class(name, at)
            out += piece
        else:
            out += re.escape(char)
    return re.compile(out, re.DOTALL)


def _class(name: str, at: int) -> tuple[str, int]:
    """What stands in brackets, from behind the first of them: an expression, and where it ends."""
    negated = name.startswith("^", at)
    at += negated
    ranges: list[str] = []
    while not (ranges and name.startswith("]", at)):
        low, at = _member(name, at)
        high = low
        if name.startswith("-", at):
            high, at = _member(name, at + 1)
        if low > high:
            raise ValueError(f"{name!r}: {low}-{high} is no range")
        ranges.append(f"{re.escape(low)}-{re.escape(high)}")
    return f"[{'^/' if negated else ''}{''.join(ranges)}]", at + 1


def _member(name: str, at: int) -> tuple[str, int]:
    if name.startswith("\\", at):
        at += 1
    elif name[at : at + 1] in ("-", "]"):
        raise ValueError(f"{name!r}: brackets with nothing in them")
    if at >= len(name):
        raise ValueError(f"{name!r}: a bracket is not closed")
    return name[at], at + 1
