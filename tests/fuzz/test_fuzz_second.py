"""The second half of the fuzz targets; the other half runs beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import checks
from tests.fuzz.targets import SECOND

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("name", SECOND)]


def test_nothing_breaks_and_the_corpus_reaches_the_parser(name: str, tmp_path: Path, seconds: int) -> None:
    checks.nothing_breaks(name, tmp_path, seconds)


def test_a_seeded_bug_is_found(name: str, tmp_path: Path) -> None:
    checks.seeded_bug_is_found(name, tmp_path)
