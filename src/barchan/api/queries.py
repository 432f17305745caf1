"""The query of each route as a type: what is read from a URL, and what the OpenAPI document says of it."""

from __future__ import annotations

import math
import re
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl

import msgspec
from aiohttp import web

from barchan.errors import InvalidRequest
from barchan.spec import BackendName, SandboxState
from barchan.wire.fields import field_of
from barchan.wire.messages import PAGE

Q = TypeVar("Q", bound="NoQuery")
_DIGITS = {8: re.compile(r"[0-7]{1,18}"), 10: re.compile(r"-?[0-9]{1,18}")}
_REAL = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?")


class NoQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all: nothing may be given."""


class PageQuery(NoQuery, frozen=True, kw_only=True):
    after: str = ""
    limit: int = PAGE


class HistoryQuery(PageQuery, frozen=True, kw_only=True):
    partial: Literal["true", "false"] = "false"
    """Also when the log does not hold all of it any more."""


class CountQuery(NoQuery, frozen=True, kw_only=True):
    count: int | None = None


class FindQuery(PageQuery, frozen=True, kw_only=True):
    """Times are Unix seconds."""

    label: tuple[str, ...] = ()
    """Each `key=value`."""
    state: tuple[SandboxState, ...] = ()
    ended: Literal["true", "false"] = "false"
    environment: str | None = None
    backend: BackendName | None = None
    node: str | None = None
    prefix: str = ""
    created_after: float | None = None
    created_before: float | None = None


class FileQuery(NoQuery, frozen=True, kw_only=True):
    """`path` may hold any bytes but NUL, percent-encoded."""

    path: str
    user: str | None = None


class WriteQuery(FileQuery, frozen=True, kw_only=True):
    mode: str | None = None
    """Octal."""


class ListQuery(FileQuery, frozen=True, kw_only=True):
    depth: int = 1


def number(text: str, field: str, base: int = 10) -> int:
    """Digits and a sign, nothing else that `int` would take."""
    if not _DIGITS[base].fullmatch(text):
        kind = "an octal number" if base == 8 else "a number"
        raise InvalidRequest(f"{field}: {text[:40]!r} is not {kind}", field=field)
    return int(text, base)


def _real(text: str, field: str) -> float:
    if not _REAL.fullmatch(text) or not math.isfinite(float(text)):
        raise InvalidRequest(f"{field}: {text[:40]!r} is not a number", field=field)
    return float(text)


_READ = {"limit": number, "count": number, "depth": number, "created_after": _real, "created_before": _real}
"""Of what is not text."""
_REPEATED = frozenset({"label", "state"})
_ANY_BYTES = frozenset({"path"})


def query_of(request: web.Request, type_: type[Q]) -> Q:
    """Raises `InvalidRequest` naming a parameter that is unknown, missing, repeated or wrong."""
    given: dict[str, Any] = {}
    text = request.rel_url.raw_query_string
    for name, value in parse_qsl(text, keep_blank_values=True, errors="surrogateescape"):
        if name not in type_.__struct_fields__:
            raise InvalidRequest(f"unknown query parameter {name[:80]!r}", field=_shown(name))
        if name not in _ANY_BYTES and _shown(value) != value:
            raise InvalidRequest(f"{name}: not UTF-8", field=name)
        if name in _REPEATED:
            given.setdefault(name, []).append(value)
        elif name in given:
            raise InvalidRequest(f"{name} is given twice", field=name)
        else:
            given[name] = _READ[name](value, name) if name in _READ else value
    return _convert(given, type_)


def _convert(given: dict[str, Any], type_: type[Q]) -> Q:
    if issubclass(type_, FileQuery) and "path" not in given:
        raise InvalidRequest("path: missing", field="path")
    try:
        return msgspec.convert(given, type_)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), field=field_of(error).partition("[")[0]) from error


def path_of(query: FileQuery) -> bytes:
    return query.path.encode("utf-8", "surrogateescape")


def _shown(text: str) -> str:
    """Without bytes that are no UTF-8."""
    return text.encode("utf-8", "replace").decode()
