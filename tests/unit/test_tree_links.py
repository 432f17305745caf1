"""Which links a download keeps: those that cannot point outside the tree."""

from __future__ import annotations

import pytest

from barchan.sdk._tree import leads_out


@pytest.mark.parametrize(
    ("link", "target"),
    [("a", "b"), ("d/a", "b"), ("d/a", "../b"), ("d/e/a", "../../b"), ("d/a", "./b"), ("a", "d/b"), ("d/a", "../d/b")],
)
def test_inside(link: str, target: str) -> None:
    assert not leads_out(link.encode().split(b"/"), target.encode())


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("a", "/etc/passwd"),
        ("a", ".."),
        ("a", "../b"),
        ("d/a", "../../b"),
        ("a", "d/../b"),
        ("d/a", "../d/../../b"),
        ("d/a", "x/.."),
        ("", "b"),
    ],
)
def test_outside(link: str, target: str) -> None:
    """`d/../b` too: `d` may itself be a link, and `..` is then its target's parent."""
    assert leads_out(link.encode().split(b"/") if link else [], target.encode())
