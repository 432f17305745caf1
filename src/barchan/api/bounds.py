"""What fields may hold beyond their types, for the OpenAPI document. The checks themselves are in `spec` and `control.checks`."""

from __future__ import annotations

from typing import Any

import msgspec

from barchan.api.queries import CountQuery, FileQuery, FindQuery, HistoryQuery, ListQuery, WriteQuery
from barchan.api.values import MAX_OUTPUT, ExecBody, PullBody, Renewal, SignalBody
from barchan.control.checks import ID
from barchan.environments import MOST_ASKED, MOST_LOCKED, LockedLayers
from barchan.image_refs import PATTERN
from barchan.images import ImageConfig
from barchan.mounts import MOST_MOUNTS, MOST_TARGET, DataMount
from barchan.names import DIGEST, NAME, REF
from barchan.packing import MOST_PATTERN, MOST_PATTERNS, PackOrder, ScrubRules
from barchan.ranges import LIMITS
from barchan.spec import HOST, MOST_TIMEOUT, EnvironmentRef, Limits, SandboxSpec
from barchan.wire.messages import MOST_AT_ONCE, PAGE

Schema = dict[str, Any]


def _whole(pattern: str) -> Schema:
    return {"pattern": f"^(?:{pattern})$"}


def _name(pattern: str) -> Schema:
    """`..` cannot occur in one."""
    return {"type": "string", "pattern": f"^(?!.*\\.\\.)(?:{pattern})$"}


_NO_NUL = {"pattern": "^[^\\u0000]*$"}
_SECONDS = {"exclusiveMinimum": 0, "exclusiveMaximum": 1e9}
_CHANGED_SECONDS = {"minimum": 1e-3, "maximum": 1e9}
_VARIABLES = {
    "propertyNames": {"pattern": "^[^=\\u0000]+$"},
    "additionalProperties": {"type": "string", **_NO_NUL},
}
_REF_PATTERN = f"{PATTERN}|(?!.*\\.\\.)(?:{REF.pattern})"
_REF = {"type": "string", **_whole(_REF_PATTERN)}
_DIGEST = {"type": "string", **_whole(DIGEST.pattern)}
_TARGET = r"^(?!/(?:proc|sys|dev)(?:/|$))(?:/(?!\.{1,2}(?:/|$))[^/\u0000]+)+$"
_PART = r"(?!\.{1,2}(?:/|$))(?:(?!\*\*)[^/\u0000])+"
_PATHS = rf"^(?!(?:\*\*|~)$)(?:\*\*/)?(?:{_PART}/)*(?:{_PART}|\*\*)$"
"""Patterns of paths, of the scrub rules."""
_PAGE = {"limit": {"minimum": 1, "maximum": PAGE}}
_FILE = {"path": {"pattern": "^[^\\u0000]+$"}, "user": {"pattern": "^[^\\u0000]+$"}}

KEY = {"type": "string", **_whole(ID.pattern)}
"""Of an idempotency key, a command's id."""
SANDBOX = {"type": "string", **_whole(f"(?:{NAME.pattern})-[a-z0-9]{{8,32}}")}

FIELDS: dict[type[msgspec.Struct], dict[str, Schema]] = {
    EnvironmentRef: {
        "base": _REF,
        "workspace": _whole(f"(?:{_REF_PATTERN})?"),
        "toolkits": {"items": _REF},
        "asked": {"items": _REF, "maxItems": MOST_ASKED},
    },
    LockedLayers: {"digest": _DIGEST, "layers": {"items": _DIGEST, "minItems": 1, "maxItems": MOST_LOCKED}},
    PullBody: {"image": _whole(PATTERN), "node": _name(NAME.pattern)},
    DataMount: {
        "source": _name(NAME.pattern),
        "target": {"pattern": _TARGET, "maxLength": MOST_TARGET},
    },
    Limits: {field: {"minimum": low, "maximum": high} for field, (low, high) in LIMITS.items()},
    SandboxSpec: {
        "labels": {"maxProperties": 64},
        "env": _VARIABLES,
        "secrets": _VARIABLES,
        "user": {"pattern": "^[^\\u0000]+$"},
        "workdir": {"pattern": "^/[^\\u0000]*$"},
        "hostname": _whole(HOST.pattern),
        "idle_timeout": _SECONDS,
        "lifetime": _SECONDS,
        "mounts": {"maxItems": MOST_MOUNTS},
    },
    PackOrder: {"name": _name(NAME.pattern)},
    ScrubRules: {
        "also": {"maxItems": MOST_PATTERNS, "items": {"type": "string", "pattern": _PATHS, "maxLength": MOST_PATTERN}},
    },
    ImageConfig: {
        "env": _VARIABLES,
        "user": _NO_NUL,
        "workdir": {"pattern": "^(?:/[^\\u0000]*)?$"},
        "entrypoint": {"items": {"type": "string", **_NO_NUL}},
        "command": {"items": {"type": "string", **_NO_NUL}},
    },
    Renewal: {"idle_timeout": _CHANGED_SECONDS, "lifetime": _CHANGED_SECONDS},
    SignalBody: {"signal": {"minimum": 1, "maximum": 64}},
    ExecBody: {
        "argv": {"minItems": 1, "items": {"type": "string", **_NO_NUL}},
        "cmd": _NO_NUL,
        "id": _whole(ID.pattern),
        "cwd": _NO_NUL,
        "env": _VARIABLES,
        "secrets": _VARIABLES,
        "user": {"pattern": "^[^\\u0000]+$"},
        "timeout": {"exclusiveMinimum": 0, "exclusiveMaximum": MOST_TIMEOUT},
        "stdin_base64": _whole("(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"),
        "grace": {"minimum": 0, "maximum": 3600},
        "output_limit": {"minimum": 0, "maximum": MAX_OUTPUT},
    },
    HistoryQuery: _PAGE,
    CountQuery: {"count": {"minimum": 1, "maximum": MOST_AT_ONCE}},
    FindQuery: {
        **_PAGE,
        "label": {"items": {"type": "string", "pattern": "^[^=]+="}},
        "environment": _REF,
        "node": _name(NAME.pattern),
    },
    FileQuery: _FILE,
    WriteQuery: {**_FILE, "mode": {"pattern": "^0{0,8}[0-7]{1,4}$"}},
    ListQuery: {**_FILE, "depth": {"minimum": 1, "maximum": 1 << 16}},
}

WHOLE: dict[type[msgspec.Struct], Schema] = {
    PackOrder: {
        "anyOf": [
            {"properties": {"config": {"type": "null"}}},
            {"required": ["whole"], "properties": {"whole": {"const": True}}},
        ],
    },
    ExecBody: {
        "oneOf": [
            {"required": ["argv"], "properties": {"argv": {"type": "array"}, "cmd": {"type": "null"}}},
            {"required": ["cmd"], "properties": {"cmd": {"type": "string"}, "argv": {"type": "null"}}},
        ],
        "not": {
            "required": ["stdin", "stdin_base64"],
            "properties": {"stdin": {"type": "string"}, "stdin_base64": {"type": "string"}},
        },
    },
}
"""Of a type as a whole."""


def bounded(components: Schema) -> Schema:
    """The schemas of types with these bounds in them."""
    for type_, fields in FIELDS.items():
        for name, bounds in fields.items():
            if type_.__name__ in components:
                _add(components[type_.__name__]["properties"][name], bounds)
    for type_, bounds in WHOLE.items():
        components[type_.__name__].update(bounds)
    return components


def _add(schema: Schema, bounds: Schema) -> None:
    """To what the field holds when it is not null."""
    target = next((one for one in schema.get("anyOf", ()) if one.get("type") != "null"), schema)
    target.update(bounds)
