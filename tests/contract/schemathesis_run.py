"""One run of schemathesis against a live API. It lives in an environment of its own: it brings plugins for pytest along."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server import exclusive

VERSION = "4.32.5"
"""Pinned: another version makes other cases of the same seed."""
CACHE = Path("/var/cache/barchan/tests" if os.geteuid() == 0 else "~/.cache/barchan/tests").expanduser()
SEED = 20
HOOKS = Path(__file__).with_name("schemathesis_hooks.py")

Document = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run of the program came to."""

    code: int
    output: str
    report: Document

    @property
    def operations(self) -> int:
        return int(self.report["operations"]["tested"])

    @property
    def cases(self) -> int:
        return int(self.report["test_cases"]["generated"])

    @property
    def warnings(self) -> dict[str, list[Any]]:
        return {name: found for name, found in self.report["warnings"].items() if found}


def environment() -> Path:
    """A virtual environment with the program, made once; about half a minute. Skips where it cannot be installed."""
    place = CACHE / f"schemathesis-{VERSION}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with exclusive(CACHE / "schemathesis.lock"):
        if not (place / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
            pip = [place / "bin/pip", "install", "-q", "--disable-pip-version-check", f"schemathesis=={VERSION}"]
            done = subprocess.run(pip, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"schemathesis cannot be installed: {done.stderr[-300:]}")
            (place / "complete").touch()
    return place


def narrowed(document: Document, values: dict[str, list[Any]]) -> Document:
    """The document with fewer values for some names, so that requests are about what is there.

    `sandbox` stands for a parameter, `ExecBody.id` for a field; with a method in front, for its operations alone.
    """
    document = copy.deepcopy(document)
    schemas = document["components"]["schemas"]
    for name, few in values.items():
        type_, dot, field = name.partition(".")
        if dot:
            schemas[type_]["properties"][field] = {"enum": few}
        for parameter in _parameters(document, name):
            parameter["schema"] = {"enum": few}
    return document


def _parameters(document: Document, name: str) -> Iterator[Document]:
    method, _, only = name.rpartition(" ")
    for operations in document["paths"].values():
        for verb, operation in operations.items():
            if method in ("", verb):
                yield from (one for one in operation["parameters"] if one["name"] == only)


def lines_as_array(document: Document) -> Document:
    """The hooks read lines of JSON as an array; OpenAPI 3.1 cannot say that a schema is that of one line."""
    document = copy.deepcopy(document)
    for operations in document["paths"].values():
        for operation in operations.values():
            for answer in operation["responses"].values():
                if line := answer.get("content", {}).get("application/x-ndjson"):
                    line["schema"] = {"type": "array", "items": line["schema"]}
    return document


async def run(place: Path, document: Document, url: str, settings: str, *options: str) -> Run:
    """Answers when all cases are through. `settings` is a schemathesis.toml."""
    program = await asyncio.to_thread(environment)
    (place / "document.json").write_text(json.dumps(lines_as_array(document)))
    (place / "settings.toml").write_text(settings)
    argv = [
        *("--config-file", "settings.toml", "run", "document.json", "--url", url, "--seed", str(SEED)),
        *("--continue-on-failure", "--no-color", "--request-timeout", "20", "--generation-database", "none"),
        *("--report", "json", "--report-json-path", "report.json", *options),
    ]
    process = await asyncio.create_subprocess_exec(
        program / "bin/schemathesis",
        *argv,
        cwd=place,
        env={"PATH": os.environ["PATH"], "HOME": str(place), "SCHEMATHESIS_HOOKS": str(HOOKS), "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Run(process.returncode or 0, output.decode(), json.loads((place / "report.json").read_text()))
