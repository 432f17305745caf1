"""Sizes, addresses, durations, pairs: what the command line accepts, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.cli.values import is_loopback, parse_address, parse_pairs, parse_seconds, parse_signal, parse_size
from barchan.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1k", 1 << 10),
        ("512m", 512 << 20),
        ("512M", 512 << 20),
        ("512MiB", 512 << 20),
        ("512mb", 512 << 20),
        ("1g", 1 << 30),
        ("1.5g", 3 << 29),
        ("2t", 2 << 40),
        (" 7b ", 7),
    ],
)
def test_size(text: str, bytes_: int) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "m", "-1", "1x", "1 000", "1e3", "0x10", "1gg", "nan", "1,5g", "٣m"])
def test_size_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a size"):
        parse_size(text)


@given(st.text())
def test_size_never_fails_otherwise(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except InvalidRequest:
        pass


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("host.example:8443", ("host.example", 8443)),
        ("[::1]:9", ("::1", 9)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
    ],
)
def test_address(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", ":80", "host", "host:", "host:x", "::1:80", "[]:80", "host:70000", "host:-1"])
def test_address_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("0.5", 0.5), ("90s", 90), ("5m", 300), ("2h", 7200)])
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "1e30", "5d", "m", "soon"])
def test_seconds_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a number of seconds"):
        parse_seconds(text)


def test_pairs() -> None:
    assert parse_pairs(["A=1", "B=", "C=x=y", "A=2"], "env") == {"A": "2", "B": "", "C": "x=y"}


@pytest.mark.parametrize("item", ["", "A", "=x"])
def test_pairs_refused(item: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_pairs(["B=1", item], "env")
    assert caught.value.field == "env"
    assert repr(item) in str(caught.value)


def test_a_refused_secret_is_not_shown() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_pairs(["hunter2"], "secrets")
    assert caught.value.field == "secrets"
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("text", "number"), [("TERM", 15), ("sigint", 2), ("9", 9), ("SIGUSR1", 10), ("64", 64)])
def test_signal(text: str, number: int) -> None:
    assert parse_signal(text) == number


@pytest.mark.parametrize("text", ["", "0", "65", "-9", "SIG", "NOPE", "٩", "9.0"])
def test_signal_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a signal"):
        parse_signal(text)
