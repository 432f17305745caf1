"""Modules and functions stay small enough to be read in one go."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src").rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function's place and its length in lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            assert node.end_lineno is not None
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_is_small(path: Path) -> None:
    assert path.read_text().count("\n") <= 400
    assert not [place for place, lines in functions(path) if lines > 60]


def test_functions_are_short_as_a_rule() -> None:
    assert median(lines for path in MODULES for _, lines in functions(path)) <= 10


@pytest.mark.parametrize("path", sorted((ROOT / "native").glob("*.c")), ids=lambda path: path.name)
def test_native_file_is_small(path: Path) -> None:
    assert path.read_text().count("\n") <= 700


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_name_says_its_job(path: Path) -> None:
    assert not {"util", "utils", "helper", "helpers", "manager", "common"} & set(path.with_suffix("").parts)
