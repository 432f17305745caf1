"""The pages on isolation say what the native part does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECCOMP = ROOT / "native" / "seccomp"
CHILD = (ROOT / "native" / "sandbox_child.c").read_text()
LISTS = ("allow.txt", "guest.txt", "refuse.txt", "ptrace.txt")
ISOLATION = (ROOT / "docs" / "reference" / "isolation.md").read_text()


def document() -> Any:
    spec = importlib.util.spec_from_file_location("document", SECCOMP / "document.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calls(name: str) -> list[str]:
    return [call for _, paragraph in document().paragraphs(name) for call in paragraph]


def test_seccomp_page_is_in_step() -> None:
    page = (ROOT / "docs" / "reference" / "seccomp.md").read_text()
    assert page == document().page(), "run: python native/seccomp/document.py > docs/reference/seccomp.md"


def test_every_paragraph_of_the_lists_has_its_reason() -> None:
    for name in ("allow.txt", "guest.txt", "refuse.txt"):
        assert all(comment for comment, _ in document().paragraphs(name))


def test_a_call_is_in_one_list_once() -> None:
    everything = [call for name in LISTS for call in calls(name)]
    assert len(everything) == len(set(everything)) > 300
    assert all(re.fullmatch("[a-z0-9_]+", call) for call in everything)
    assert calls("guest.txt") == ["clone3"]


@pytest.mark.parametrize("array", ["masked_files", "masked_directories", "read_only"])
def test_every_mask_is_documented(array: str) -> None:
    block = re.search(rf"{array}\[\] = {{(.*?)}};", CHILD, re.DOTALL)
    assert block
    for path in re.findall(r'"([^"]+)"', block[1]):
        assert f"`/{path}`" in ISOLATION, path


def test_kept_capabilities_are_documented() -> None:
    kept = re.search(r"define CAPS_KEPT(.*?)\n\n", CHILD, re.DOTALL)
    listed = re.search(r"^Kept: ([A-Z_ ]+)\.", ISOLATION, re.MULTILINE)
    assert kept and listed
    assert set(re.findall(r"BIT\(CAP_(\w+)\)", kept[1])) == set(listed[1].split())
