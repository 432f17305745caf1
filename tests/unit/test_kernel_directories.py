"""Modes of directories do not depend on the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.kernel import directories


@pytest.fixture(params=[0, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """After the test's own directory was made."""
    old = os.umask(request.param)
    try:
        yield
    finally:
        os.umask(old)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.usefixtures("umask")
def test_private_with_missing_parents(tmp_path: Path) -> None:
    before = mode(tmp_path)
    directories.private(tmp_path / "a/b/c")
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/b/c")] == [0o700] * 3
    assert mode(tmp_path) == before


@pytest.mark.usefixtures("umask")
def test_private_closes_what_exists_and_nothing_above_it(tmp_path: Path) -> None:
    directories.make(tmp_path / "a/b", 0o755)
    directories.private(tmp_path / "a/b")
    assert (mode(tmp_path / "a"), mode(tmp_path / "a/b")) == (0o755, 0o700)


@pytest.mark.usefixtures("umask")
def test_make_leaves_what_exists(tmp_path: Path) -> None:
    directories.make(tmp_path / "a", 0o700)
    directories.make(tmp_path / "a", 0o755)
    assert mode(tmp_path / "a") == 0o700


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        directories.private(tmp_path / "a")
