"""Documents agree with the code: nothing undocumented, nothing promised that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import barchan as public
from tests.repo import cli_reference
from tests.repo.reference import SDK, tables, with_table
from tests.repo.sdk_reference import blocks, with_block

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BARS = ROOT / "SPECIFICATION.md"


def test_commands_are_documented_as_they_say_themselves() -> None:
    page = cli_reference.PAGE.read_text()
    assert page == cli_reference.with_sections(page), "run python -m tests.repo.reference"
    assert all(f"\n### barchan {name}\n" in page for name, _ in cli_reference.commands())


@pytest.mark.parametrize(("page", "heading", "rows"), list(tables()), ids=lambda value: str(value)[-20:])
def test_table_is_what_the_code_says(page: Path, heading: str, rows: list[str]) -> None:
    text = page.read_text()
    assert text == with_table(text, heading, rows), "run python -m tests.repo.reference"
    assert rows


@pytest.mark.parametrize(("name", "lines"), list(blocks()), ids=lambda value: str(value)[:20])
def test_sdk_page_is_what_the_code_says(name: str, lines: list[str]) -> None:
    assert SDK.read_text() == with_block(SDK.read_text(), name, lines), "run python -m tests.repo.reference"
    assert any(lines)


def test_every_public_name_is_on_the_sdk_page() -> None:
    named = set(re.findall(r"\w+", SDK.read_text()))
    assert not [name for name in public.__all__ if name not in named]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert set(re.findall(r"\]\(([\w/.-]+\.md)\)", index)) == pages - {"index.md"}


def promises() -> list[list[str]]:
    """Rows of the tables in SPECIFICATION.md: promise, figure, for benches what was seen, and what checks it."""
    rows = [line.strip("| \n").split("|") for line in BARS.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return [row for row in cells if not set(row[0]) <= {"-", " "} and row[0] != "promise"]


@pytest.mark.parametrize("row", promises(), ids=lambda row: row[0][:50])
def test_promise_names_its_check(row: list[str]) -> None:
    _, figure, *_, check = row
    assert re.search(r"\d", figure), "a promise is a number"
    benches = re.findall(r"`\./dev bench (\w+)`", check)
    tests = re.findall(r"`(tests/\S+?\.(?:py|c))(?:::(\w+))?`", check)
    assert benches or tests or check == "test pending", check
    assert all((ROOT / f"bench/{name}.py").exists() for name in benches)
    for path, function in tests:
        assert function in (ROOT / path).read_text()


def test_commands_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    known = {name for name, _ in cli_reference.commands()}
    for words in re.findall(r"^(?:sudo )?barchan ([a-z]+(?: [a-z]+)?)", text, re.MULTILINE):
        assert words in known or words.split()[0] in known, words
    dev = (ROOT / "dev").read_text()
    for name in re.findall(r"\./dev ([a-z]+)", text):
        assert re.search(rf"^    {name}\)", dev, re.MULTILINE), name
