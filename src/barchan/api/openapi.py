"""The OpenAPI document, made from the route table and the types. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from barchan._version import __version__
from barchan.api.bounds import KEY, SANDBOX, WHOLE, bounded
from barchan.api.reply import MAX_BODY
from barchan.api.routes import Route, errors_of
from barchan.errors import ErrorBody, Unauthenticated

_REF = "#/components/schemas/{name}"
_RAW = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_IN_PATH = {"sandbox": SANDBOX, "exec": KEY}
_ABOUT = """Errors are JSON, whatever the request was: also a path that is not here (404), a method that a path does not have
(405, with `Allow`) and what is not HTTP (400). Unknown parameters and fields are refused, as is a field given twice."""

Schema = dict[str, Any]


def document(routes: Iterable[Route]) -> Schema:
    routes = tuple(routes)
    types = [type_ for route in routes for type_ in _types(route)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = {repr(type_): schema for type_, schema in zip(types, schemas, strict=True)}
    bounded(components)
    queries = {type_: components.pop(type_.__name__) for type_ in {route.query for route in routes}}
    paths: dict[str, Schema] = {}
    for route in routes:
        operation = _operation(route, by_type, queries[route.query])
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "barchan", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
    }


def _types(route: Route) -> Iterator[Any]:
    yield from (type_ for type_ in (route.body, route.answer, route.lines) if type_ not in (None, bytes))
    yield from (route.query, ErrorBody)


def _operation(route: Route, schemas: Schema, query: Schema) -> Schema:
    operation: Schema = {
        "summary": route.summary,
        "operationId": f"{route.handler.__module__.rpartition('.')[2]}_{route.handler.__name__}",
        "parameters": [*_in_path(route), *_in_query(query), *_in_headers(route)],
        "responses": {**_answers(route, schemas), **_errors(route, schemas)},
    }
    if route.body is not None:
        operation["requestBody"] = {"required": _must_be_sent(route.body), "content": _content(route.body, schemas)}
    if route.open:
        operation["security"] = []
    return operation


def _in_path(route: Route) -> list[Schema]:
    names = re.findall(r"{(\w+)}", route.path)
    return [{"name": name, "in": "path", "required": True, "schema": _IN_PATH[name]} for name in names]


def _in_query(query: Schema) -> list[Schema]:
    required = query["required"]
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _not_null(schema)}
        for name, schema in query["properties"].items()
    ]


def _in_headers(route: Route) -> list[Schema]:
    return [{"name": "Idempotency-Key", "in": "header", "required": False, "schema": KEY}] if route.key else []


def _not_null(schema: Schema) -> Schema:
    """A query has no null: what may be null in the type may be absent."""
    if "anyOf" not in schema:
        return schema
    (only,) = (one for one in schema["anyOf"] if one.get("type") != "null")
    return dict(only)


def _must_be_sent(body: Any) -> bool:
    """A body that is absent is an empty one, which may do."""
    return body is not bytes and (body in WHOLE or any(field.required for field in msgspec.structs.fields(body)))


def _answers(route: Route, schemas: Schema) -> Schema:
    answers: Schema = {str(route.status): {"description": "done"}}
    if route.answer is not None:
        answers[str(route.status)]["content"] = _content(route.answer, schemas)
    if route.lines is not None:
        line = {"application/x-ndjson": {"schema": schemas[repr(route.lines)]}}
        answers["200"] = {"description": "a line of JSON for each; the schema is that of one line", "content": line}
    return answers


def _errors(route: Route, schemas: Schema) -> Schema:
    """By status, with the codes that come with it."""
    codes: dict[int, list[str]] = {}
    for cls in errors_of(route):
        codes.setdefault(cls.status, []).append(f"`{cls.code}`")
    if route.body not in (None, bytes):
        codes[413] = [f"`invalid_request`: the body exceeds {MAX_BODY} bytes"]
    content = _content(ErrorBody, schemas)
    answers: Schema = {
        str(status): {"description": ", ".join(codes[status]), "content": content} for status in sorted(codes)
    }
    if not route.open:
        answers[str(Unauthenticated.status)]["headers"] = {
            "WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}
        }
    return answers


def _content(type_: Any, schemas: Schema) -> Schema:
    return _RAW if type_ is bytes else {"application/json": {"schema": schemas[repr(type_)]}}
