from __future__ import annotations

import os
from pathlib import Path

import pytest

from barchan.errors import InvalidRequest
from barchan.layers import bootstrap
from barchan.layers.bootstrap import Mirrors, choose, host_mirrors, parse_list, parse_sources
from barchan.layers.store import LayerStore

LIST = """
# deb http://commented.example/debian bookworm main
deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib  # note
deb-src http://source.example/debian bookworm main
deb http://mirror.example/debian bookworm-updates main
deb http://security.example/debian-security bookworm-security main
broken
deb
"""
SOURCES = """Types: deb deb-src
# a comment: with a colon
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm-updates

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
"""
EXPECTED = Mirrors("http://mirror.example/debian", "http://security.example/debian-security")


@pytest.mark.parametrize("entries", [parse_list(LIST), parse_sources(SOURCES)], ids=["list", "deb822"])
def test_mirrors_of_the_host(entries: list[tuple[str, str]]) -> None:
    assert choose(entries) == EXPECTED


def test_third_party_archives_are_no_mirrors() -> None:
    assert choose([("http://other.example/apt", "stable"), ("http://other.example/x", "nodistro")]) == Mirrors()
    assert Mirrors().lines("bookworm") == ()


def test_lines_name_the_suite_asked_for_not_the_hosts() -> None:
    assert EXPECTED.lines("trixie") == (
        "deb http://mirror.example/debian trixie main",
        "deb http://mirror.example/debian trixie-updates main",
        "deb http://security.example/debian-security trixie-security main",
    )


def test_files_of_the_host_are_read(tmp_path: Path) -> None:
    assert host_mirrors(tmp_path) == Mirrors()
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/debian.sources").write_text(SOURCES)
    assert host_mirrors(tmp_path) == EXPECTED
    (tmp_path / "sources.list").write_text(LIST.replace("mirror", "first"))
    assert host_mirrors(tmp_path).archive == "http://first.example/debian"


def test_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        bootstrap.bootstrap(LayerStore(tmp_path), "debian-11", cache=tmp_path)
    assert "debian-12" in caught.value.hint


def test_cache_is_bounded(tmp_path: Path) -> None:
    for number in range(bootstrap.KEPT + 3):
        path = tmp_path / f"{number}"
        path.mkdir()
        (path / "image").touch()
        os.utime(path, (number, number))
    bootstrap._bound(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "5", "6"]
