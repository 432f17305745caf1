"""The synchronous client is what its generator writes."""

from __future__ import annotations

import pytest

from tests.repo.unasync import ROOT, converted, generated

MADE = generated()


@pytest.mark.parametrize("target", MADE)
def test_generated_file_is_current(target: str) -> None:
    assert (ROOT / target).read_text() == MADE[target], "run python -m tests.repo.unasync"


def test_what_is_left_of_async() -> None:
    """A rule that is missing would leave something behind."""
    for target, text in MADE.items():
        code = [line for line in text.splitlines() if not line.startswith("# Generated")]
        assert not [line for line in code if "asyncio" in line or "await " in line or "async " in line], target


def test_a_rule_without_use_is_found() -> None:
    unused = {"async def", "not to be found"}
    made = converted({"src/barchan/sdk/_process.py": "x.py"}, {"async def": "def", "not to be found": ""}, unused)
    assert unused == {"not to be found"}
    assert "async def" not in made["x.py"] and "    def wait(self)" in made["x.py"]
