"""A range of host ids belongs to one sandbox of the host, whoever made it."""

from __future__ import annotations

from pathlib import Path

import pytest

from barchan.errors import CreateFailed
from barchan.kernel.idranges import IdRanges


def installation(directory: Path, name: str, slots: int = 4) -> IdRanges:
    ranges = IdRanges(directory, name, slots)
    ranges.prepare()
    return ranges


def test_two_installations_never_hold_the_same_range(tmp_path: Path) -> None:
    a, b = installation(tmp_path, "a"), installation(tmp_path, "b")
    held = [a.claim("box"), b.claim("box"), a.claim("other"), b.claim("other")]
    assert sorted(held) == [0, 1, 2, 3]
    with pytest.raises(CreateFailed) as full:
        a.claim("one too many")
    assert full.value.phase == "ids" and full.value.hint
    assert a.list() == {"box", "other"}


def test_a_released_range_is_free_for_anybody(tmp_path: Path) -> None:
    a, b = installation(tmp_path, "a", 1), installation(tmp_path, "b", 1)
    slot = a.claim("box")
    with pytest.raises(CreateFailed):
        b.claim("box")
    a.release("box")
    a.release("box")
    a.release("never was there")
    assert b.claim("box") == slot and not a.list()


def test_what_a_killed_process_took_is_found_by_its_next_run(tmp_path: Path) -> None:
    a, b = installation(tmp_path, "a", 2), installation(tmp_path, "b", 2)
    a.claim("box")
    kept = b.claim("box")
    again = installation(tmp_path, "a", 2)
    assert again.list() == {"box"}
    again.release("box")
    assert not again.list() and b.list() == {"box"}, "another installation's place of the same name is not touched"
    assert again.claim("new") == 1 - kept


def test_nothing_is_left_when_all_is_given_back(tmp_path: Path) -> None:
    a = installation(tmp_path, "a")
    a.claim("box")
    a.release("box")
    assert not list(tmp_path.iterdir())
