"""The parts of docs/reference that are made from the code. `python -m tests.repo.reference` writes them anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from barchan.api.routes import ROUTES
from barchan.builds.support import INSTRUCTIONS
from barchan.errors import tree
from tests.repo import cli_reference, sdk_reference
from tests.repo.fields import DESCRIBED, settings

REFERENCE = Path(__file__).parents[2] / "docs/reference"
SDK = REFERENCE / "sdk.md"


def errors() -> list[str]:
    return [f"| `{e.code}` | `{e.__name__}` | {e.party} | {'yes' if e.retry else 'no'} | {e.status} |" for e in tree()]


def routes() -> list[str]:
    return [f"| `{route.method} {route.path}` | {route.summary} |" for route in ROUTES]


def instructions() -> list[str]:
    rows = []
    for name, support in INSTRUCTIONS.items():
        options = [f"`--{flag}`" for flag in (*support.valued, *support.bare)]
        refused = (
            f" Refused: {', '.join(f'`--{flag}`' for flag in support.unsupported)}." if support.unsupported else ""
        )
        rows.append(f"| `{name}` | {' '.join(options)} | {support.means}{refused} |")
    return rows


def tables() -> Iterator[tuple[Path, str, list[str]]]:
    """Page, heading of the section that holds the table ("" for the page's own), rows."""
    yield REFERENCE / "errors.md", "", errors()
    yield REFERENCE / "http.md", "", routes()
    yield REFERENCE / "dockerfile.md", "", instructions()
    for name in DESCRIBED:
        yield REFERENCE / "settings.md", name, settings(name)


def with_table(text: str, heading: str, rows: list[str]) -> str:
    """The page with these rows in place of those that the first table after the heading has."""
    start = text.index(f"\n## {heading}\n") if heading else 0
    table = re.compile(r"(\|-[-|]*\n)((?:\|.*\n)*)")
    return text[:start] + table.sub(lambda found: found[1] + "".join(f"{row}\n" for row in rows), text[start:], count=1)


def main() -> None:
    for page, heading, rows in tables():
        page.write_text(with_table(page.read_text(), heading, rows))
    cli_reference.PAGE.write_text(cli_reference.with_sections(cli_reference.PAGE.read_text()))
    for name, lines in sdk_reference.blocks():
        SDK.write_text(sdk_reference.with_block(SDK.read_text(), name, lines))


if __name__ == "__main__":
    main()
