"""References of images mean what they mean to docker, and the API document says which there are."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from barchan.api.bounds import FIELDS
from barchan.errors import InvalidRequest
from barchan.image_refs import LONGEST, PATTERN, parse_image
from barchan.names import check_ref
from barchan.spec import EnvironmentRef

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("debian:12", "docker.io/library/debian:12"),
        ("owner/name", "docker.io/owner/name:latest"),
        ("docker.io/debian", "docker.io/library/debian:latest"),
        ("index.docker.io/owner/name:1", "docker.io/owner/name:1"),
        ("localhost/name", "localhost/name:latest"),
        ("localhost:5000/a/b:x", "localhost:5000/a/b:x"),
        ("[::1]:5000/name", "[::1]:5000/name:latest"),
        ("ghcr.io/o/n/m__x.y-z:V1.2_3", "ghcr.io/o/n/m__x.y-z:V1.2_3"),
        (f"ghcr.io/o/n@{DIGEST}", f"ghcr.io/o/n@{DIGEST}"),
        (f"debian:12@{DIGEST}", f"docker.io/library/debian:12@{DIGEST}"),
    ],
)
def test_what_docker_means(text: str, whole: str) -> None:
    found = parse_image(f"docker://{text}")
    assert str(found) == f"docker://{whole}"
    assert parse_image(str(found)) == found
    assert str(found.unambiguous) == str(found).replace(":12@", "@")


@pytest.mark.parametrize(
    "text",
    ["", "Debian", "../a", "a//b", "a/", ":12", "a:", "a@sha256:12", "a b", "a\0", "a:" + "t" * 129, "a/" * 300 + "a"],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_image(f"docker://{text}", "environment.base")
    assert refused.value.field == "environment.base"


@settings(max_examples=40)
@given(st.from_regex(PATTERN, fullmatch=True).filter(lambda text: len(text) <= 400))
def test_every_text_of_the_pattern_is_one(text: str) -> None:
    found = parse_image(text)
    for other in (found, found.pinned(DIGEST)):
        assert parse_image(str(other)) == other and len(str(other)) <= LONGEST


@pytest.mark.parametrize(
    "text", ["debian-12", "debian-12@3", DIGEST, "docker://debian:12", f"docker://ghcr.io/o/n@{DIGEST}"]
)
def test_the_api_document_knows_all_kinds(text: str) -> None:
    check_ref(text, "environment")
    for field in ("base", "workspace"):
        assert re.search(FIELDS[EnvironmentRef][field]["pattern"], text)


@pytest.mark.parametrize("text", ["docker://", "docker://A", "a..b", "a@b@c", "http://a"])
def test_the_api_document_knows_nothing_else(text: str) -> None:
    with pytest.raises(InvalidRequest):
        check_ref(text, "environment")
    assert not re.search(FIELDS[EnvironmentRef]["base"]["pattern"], text)
