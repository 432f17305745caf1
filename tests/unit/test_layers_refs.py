from __future__ import annotations

import pytest

from barchan.errors import InvalidRequest
from barchan.layers import refs

HEX = "a1" * 32


@pytest.mark.parametrize(
    ("text", "name", "version", "digest"),
    [
        ("debian-12", "debian-12", "", ""),
        ("debian-12@3", "debian-12", "3", ""),
        ("a.b_c@latest", "a.b_c", "latest", ""),
        (f"sha256:{HEX}", "", "", f"sha256:{HEX}"),
    ],
)
def test_parts_of_a_reference(text: str, name: str, version: str, digest: str) -> None:
    ref = refs.parse(text)
    assert (ref.name, ref.version, ref.digest) == (name, version, digest)
    assert str(ref) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Debian",
        "a/b",
        "../x",
        "a..b",
        "a@",
        "@3",
        "a@3@4",
        f"sha256:{HEX[:-1]}",
        f"sha256:{HEX.upper()}",
        "a\n",
        "a b",
    ],
)
def test_refuses_what_is_no_reference(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        refs.parse(text, "environment.base")
    assert caught.value.field == "environment.base"


def test_digest_in_hex() -> None:
    assert refs.hex_of(f"sha256:{HEX}") == HEX
    with pytest.raises(InvalidRequest):
        refs.hex_of(f"sha256:../{HEX}")
