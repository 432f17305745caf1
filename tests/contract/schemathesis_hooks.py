"""What schemathesis loads in its own environment: how to read lines of JSON, and what to make of some valid bodies."""

from __future__ import annotations

import json
from typing import Any

import schemathesis

ROOM = 1 << 40
"""Bytes that the scripted node has of everything."""


@schemathesis.deserializer("application/x-ndjson")
def lines(context: Any, response: Any) -> list[Any]:
    whole, _, rest = response.content.decode().rpartition("\n")
    if rest and not response.is_truncated:  # it reads only the beginning of a long answer
        raise ValueError(f"the last line has no end: {rest[-80:]!r}")
    return [json.loads(line) for line in whole.splitlines()]


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Nothing here makes a wrong body right.

    12.0 is an integer to JSON Schema and 12 to nearly every program that writes JSON; the API takes 12 alone. A limit that
    no node here can ever keep is refused, however valid.
    """
    if isinstance(body, dict):
        return {name: map_body(context, value) for name, value in body.items()}
    if isinstance(body, list):
        return [map_body(context, value) for value in body]
    if isinstance(body, float) and body.is_integer():
        body = int(body)
    return ROOM if type(body) is int and ROOM < body < 1 << 62 else body
