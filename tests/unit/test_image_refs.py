"""References of images mean what they mean to docker, and the API document says which there are."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.api.bounds import FIELDS
from barchan.errors import InvalidRequest
from barchan.image_refs import parse_image
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
    ["", "Debian", "../a", "a//b", "a/", ":12", "a:", "a@sha256:12", "a b", "a\0", "a:" + "t" * 129],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_image(f"docker://{text}", "environment.base")
    assert refused.value.field == "environment.base"


def text(pattern: str) -> st.SearchStrategy[str]:
    return st.from_regex(pattern, fullmatch=True)


WORD = r"[a-z0-9]{1,4}"
REGISTRY = st.one_of(st.just(""), text(rf"({WORD}([.-]{{1,2}}{WORD}){{0,2}}|\[[0-9a-f:]{{2,6}}\])(:[0-9]{{1,5}})?/"))
REPOSITORY = text(rf"{WORD}((\.|_|__|-{{1,3}}){WORD}){{0,2}}(/{WORD}){{0,2}}")
SUFFIX = st.builds(
    "".join, st.tuples(text(r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,5})?"), st.sampled_from(["", f"@{DIGEST}"]))
)


@given(st.builds("".join, st.tuples(st.just("docker://"), REGISTRY, REPOSITORY, SUFFIX)))
def test_what_the_pattern_takes_is_one_whatever_looks_like_a_registry(reference: str) -> None:
    found = parse_image(check_ref(reference, "environment"))
    for other in (found, found.pinned(DIGEST)):
        assert parse_image(str(other)) == other


@pytest.mark.parametrize(
    "text",
    [
        "debian-12",
        "debian-12@3",
        DIGEST,
        "docker://debian:12",
        f"docker://ghcr.io/o/n@{DIGEST}",
        "docker://" + "a" * 225,
    ],
)
def test_the_api_document_knows_all_kinds(text: str) -> None:
    check_ref(text, "environment")
    for field in ("base", "workspace"):
        assert re.search(FIELDS[EnvironmentRef][field]["pattern"], text)


@pytest.mark.parametrize("text", ["docker://", "docker://A", "docker://" + "a" * 226, "a..b", "a@b@c", "http://a"])
def test_the_api_document_knows_nothing_else(text: str) -> None:
    with pytest.raises(InvalidRequest):
        check_ref(text, "environment")
    assert not re.search(FIELDS[EnvironmentRef]["base"]["pattern"], text)
