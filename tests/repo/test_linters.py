"""Linters are tests. Their programs are in the `dev` extra, so a missing one is a failure, not a skip."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
PYTHON = ["src", "tests", "bench", "examples", "hatch_build.py"]


def run(*argv: str) -> None:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout}{done.stderr}"


def test_ruff() -> None:
    run(str(TOOLS / "ruff"), "check", *PYTHON)


def test_ruff_format() -> None:
    run(str(TOOLS / "ruff"), "format", "--check", *PYTHON)


@pytest.mark.timeout(300)
def test_mypy_strict() -> None:
    run(str(TOOLS / "mypy"))


def test_import_contracts() -> None:
    run(str(TOOLS / "lint-imports"))


@pytest.mark.parametrize("script", ["dev", ".ci/run"])
def test_shellcheck(script: str) -> None:
    program = shutil.which("shellcheck")
    assert program, "shellcheck is missing: ./dev test installs it"
    run(program, script)
