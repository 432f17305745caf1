"""The OpenAPI document: valid by its own specification, complete, and made from the types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from barchan.api.app import make_app
from barchan.api.auth import Auth
from barchan.api.bounds import FIELDS
from barchan.api.openapi import document
from barchan.api.queries import NoQuery
from barchan.api.routes import ROUTES, Route, errors_of
from barchan.control.dispatch import Dispatch
from barchan.control.nodes import Nodes
from barchan.errors import BarchanError, tree

Document = dict[str, Any]
BY_NAME = [pytest.param(route, id=f"{route.method} {route.path}") for route in ROUTES]


@pytest.fixture(scope="module")
def whole() -> Document:
    """As it is sent."""
    found: Document = msgspec.json.decode(msgspec.json.encode(document(ROUTES)))
    return found


def operation(whole: Document, route: Route) -> Document:
    found: Document = whole["paths"][route.path][route.method.lower()]
    return found


def test_it_is_valid(whole: Document) -> None:
    assert whole["openapi"].startswith("3.1.")
    OpenAPIV31SpecValidator(whole).validate()


def test_the_validator_finds_what_is_wrong(whole: Document) -> None:
    broken = {**whole, "paths": {"/x": {"get": {"responses": {"200": {}}}}}}
    assert list(OpenAPIV31SpecValidator(broken).iter_errors())


def test_it_holds_exactly_what_the_application_serves(whole: Document) -> None:
    app = make_app(Dispatch(Nodes(0.1)), Auth(None))
    served = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}
    listed = {(method.upper(), path) for path, methods in whole["paths"].items() for method in methods}
    assert served == listed == {(route.method, route.path) for route in ROUTES}


def test_every_operation_has_a_name_of_its_own(whole: Document) -> None:
    names = [one["operationId"] for methods in whole["paths"].values() for one in methods.values()]
    assert len(set(names)) == len(names) == len(ROUTES)


def test_it_refers_only_to_what_it_defines(whole: Document) -> None:
    defined = {f"#/components/schemas/{name}" for name in whole["components"]["schemas"]}
    assert set(_references(whole)) == defined


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)


@pytest.mark.parametrize("route", BY_NAME)
def test_every_parameter_is_listed(whole: Document, route: Route) -> None:
    listed = {(one["in"], one["name"]): one for one in operation(whole, route)["parameters"]}
    in_path = {("path", name) for name in re.findall(r"{(\w+)}", route.path)}
    in_query = {("query", field.encode_name) for field in msgspec.structs.fields(route.query)}
    in_headers = {("header", "Idempotency-Key")} if route.key else set()
    assert set(listed) == in_path | in_query | in_headers
    for field in msgspec.structs.fields(route.query):
        assert listed["query", field.name]["required"] == field.required
        assert {"type", "enum"} & set(listed["query", field.name]["schema"])


@pytest.mark.parametrize("route", BY_NAME)
def test_every_status_is_listed_with_its_codes(whole: Document, route: Route) -> None:
    answers = operation(whole, route)["responses"]
    assert str(route.status) in answers and "default" not in answers
    for cls in errors_of(route):
        answer = answers[str(cls.status)]
        assert f"`{cls.code}`" in answer["description"]
        assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
    assert ("413" in answers) == (route.body not in (None, bytes))


@pytest.mark.parametrize("route", BY_NAME)
def test_who_needs_a_token(whole: Document, route: Route) -> None:
    one = operation(whole, route)
    assert whole["security"] == [{"token": []}]
    assert whole["components"]["securitySchemes"]["token"] == {"type": "http", "scheme": "bearer"}
    assert ("401" in one["responses"]) == (not route.open) == (one.get("security") != [])
    assert route.open or one["responses"]["401"]["headers"]["WWW-Authenticate"]["required"]


def test_media_types(whole: Document) -> None:
    made = whole["paths"]["/v1/sandboxes"]["post"]["responses"]
    assert set(made["200"]["content"]) == {"application/x-ndjson"}
    assert set(made["201"]["content"]) == {"application/json"}
    files = whole["paths"]["/v1/sandboxes/{sandbox}/files"]
    assert set(files["get"]["responses"]["200"]["content"]) == {"application/octet-stream"}
    assert set(files["put"]["requestBody"]["content"]) == {"application/octet-stream"}
    assert "content" not in whole["paths"]["/v1/connect"]["get"]["responses"]["101"]


def test_bounds_are_of_fields_that_exist() -> None:
    for type_, fields in FIELDS.items():
        assert set(fields) <= set(type_.__struct_fields__)


def test_bounds_reach_the_document(whole: Document) -> None:
    schemas = whole["components"]["schemas"]
    assert schemas["Limits"]["properties"]["memory"]["minimum"] == 16 << 20
    assert "pattern" in schemas["EnvironmentRef"]["properties"]["base"]
    some, null = schemas["ExecBody"]["properties"]["timeout"]["anyOf"]
    assert "exclusiveMinimum" in some and null == {"type": "null"}
    assert not {type_.__name__ for type_ in FIELDS if issubclass(type_, NoQuery)} & set(schemas)


def test_families_of_errors_are_opened() -> None:
    """A route that names a family lists what is below it."""
    reading = next(route for route in ROUTES if route.summary == "Read a file")
    codes = {cls.code for cls in errors_of(reading)}
    assert {"file_missing", "file_denied", "user_not_found", "sandbox_stopped", "node_unavailable"} <= codes
    assert set(errors_of(reading)) < set(tree(BarchanError))
