"""The tables of docs/reference that are made from the code. `python -m tests.repo.reference` writes them anew."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from barchan import config, spec
from barchan.api.routes import ROUTES
from barchan.errors import tree

REFERENCE = Path(__file__).parents[2] / "docs/reference"
DESCRIBED = {
    "SandboxSpec": spec,
    "Limits": spec,
    "Exec": spec,
    "ExecResult": spec,
    "NodeConfig": config,
    "ApiConfig": config,
}
"""Sections of settings.md, by the class that each is about."""
SHORT = {
    "environment": "Layers to compose: `base`, at most one `workspace`, `toolkits`.",
    "backend": "Only `container` exists so far.",
    "limits": "See Limits.",
    "network": "Only `deny` exists so far: loopback alone.",
    "labels": "At most 64, to find it again.",
    "user": "Who runs programs: a name or a number.",
    "workdir": "Where programs start.",
    "argv": "Program and arguments.",
    "cwd": "Absent: the sandbox's `workdir`.",
    "merge_stderr": "Standard error goes into standard output.",
}
"""For fields whose name says nearly all, so that the code says no more."""


def settings(name: str) -> list[str]:
    """Rows of one class: field, type, default, meaning."""
    source = ast.parse(inspect.getsource(DESCRIBED[name]))
    body = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == name).body
    return [
        _row(field, following) for field, following in zip(body, [*body[1:], None], strict=True) if _is_field(field)
    ]


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign)


def _row(field: ast.stmt, following: ast.stmt | None) -> str:
    assert isinstance(field, ast.AnnAssign)
    name = ast.unparse(field.target)
    doc = ""
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        doc = " ".join(str(following.value.value).split())
    default = ast.unparse(field.value) if field.value else "required"
    kind = ast.unparse(field.annotation).replace("|", "or")
    return f"| `{name}` | {kind} | {default} | {doc or SHORT.get(name, '')} |"


def errors() -> list[str]:
    return [f"| `{e.code}` | `{e.__name__}` | {e.party} | {'yes' if e.retry else 'no'} | {e.status} |" for e in tree()]


def routes() -> list[str]:
    return [f"| `{route.method} {route.path}` | {route.summary} |" for route in ROUTES]


def tables() -> Iterator[tuple[Path, str, list[str]]]:
    """Page, heading of the section that holds the table ("" for the page's own), rows."""
    yield REFERENCE / "errors.md", "", errors()
    yield REFERENCE / "http.md", "", routes()
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


if __name__ == "__main__":
    main()
