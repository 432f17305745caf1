"""The OpenAPI document, made from the route table and the types. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from barchan._version import __version__
from barchan.api.routes import Route
from barchan.errors import ErrorBody

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_RAW = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_REQUIRED = frozenset({"path"})


def document(routes: Iterable[Route]) -> dict[str, Any]:
    routes = tuple(routes)
    types = [
        type_ for route in routes for type_ in (route.body, route.answer, route.lines) if type_ not in (None, bytes)
    ]
    schemas, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REF)
    by_type = {repr(type_): schema for type_, schema in zip([*types, ErrorBody], schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "barchan", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.handler.__module__.rpartition('.')[2]}_{route.handler.__name__}",
        "parameters": _parameters(route),
        "responses": {
            str(route.status): {"description": "done", **_content(route.answer, schemas)},
            "default": {"description": "a typed error", **_content(ErrorBody, schemas)},
        },
    }
    if route.lines is not None:
        line = {"application/x-ndjson": {"schema": schemas[repr(route.lines)]}}
        operation["responses"]["200"] = {"description": "one line each", "content": line}
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_content(route.body, schemas)}
    if route.open:
        operation["security"] = []
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    text = {"schema": {"type": "string"}}
    inside = [{"name": name, "in": "path", "required": True, **text} for name in re.findall(r"{(\w+)}", route.path)]
    query = [{"name": name, "in": "query", "required": name in _REQUIRED, **text} for name in route.query]
    headers = [{"name": name, "in": "header", "required": False, **text} for name in route.headers]
    return inside + query + headers


def _content(type_: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    if type_ is None:
        return {}
    return {"content": _RAW if type_ is bytes else {_JSON: {"schema": schemas[repr(type_)]}}}
