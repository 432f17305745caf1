"""What the README, the tutorial and the SDK's page tell people to type is typed here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from barchan.layers.bootstrap import PACKAGES
from tests.server import Server

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/tutorial/first-sandbox.md")
ELSEWHERE = re.compile(r"^(\./dev|\. |barchan (up|down|doctor|env bootstrap|stop))")
"""Lines that the fixtures stand for, or that would end what other tests use."""
AROUND = """
import asyncio
from barchan import Client


async def main() -> None:
    async with Client() as client:
        async with await client.create("debian-12") as sandbox:
{}

asyncio.run(main())
"""
"""What the examples of the SDK's page have around them, as the page says."""
Run = Callable[[str, list[str]], "subprocess.CompletedProcess[str]"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def run(server: Server, debian_env: str, tmp_path: Path) -> Run:
    """Runs a program with a script as its input, as a user of this server would."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "BARCHAN_DATA": str(server.data)}
    env["BARCHAN_URL"] = f"unix:{server.data / 'run/api.sock'}"

    def run(script: str, argv: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, input=script, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize(("page", "printed"), list(zip(PAGES, ("0 b'42\\n'", "b'one\\n' 3"), strict=True)))
def test_python_of_the_documents(run: Run, page: str, printed: str) -> None:
    for snippet in blocks(page, "python"):
        done = run(snippet, [sys.executable, "-W", "error", "-"])
        assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr


@pytest.mark.parametrize(("page", "printed"), list(zip(PAGES, ("42", "one"), strict=True)))
def test_shell_of_the_documents(run: Run, page: str, printed: str) -> None:
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if not ELSEWHERE.match(line)]
    done = run("\n".join(lines), ["sh", "-e"])
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout.split()


HOW_TO = ("docs/how-to/shells-and-terminals.md", "docs/how-to/many-sandboxes.md")


def samples(page: str) -> list[tuple[str, str | None]]:
    """Each with the output that the page shows after it."""
    found = re.findall(
        r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    return [(code, shown or None) for code, shown in found]


@pytest.mark.parametrize(
    ("code", "shown"), [sample for page in HOW_TO for sample in samples(page)], ids=lambda text: str(text)[:30]
)
def test_samples_of_the_guides(run: Run, code: str, shown: str | None) -> None:
    script = code if "asyncio.run" in code else AROUND.format(textwrap.indent(code, " " * 12))
    done = run(script, [sys.executable, "-W", "error", "-"])
    assert done.returncode == 0, done.stderr
    assert shown is None or done.stdout == shown


def test_the_tutorial_names_what_is_in_the_environment() -> None:
    text = (ROOT / "docs/tutorial/first-sandbox.md").read_text()
    assert all(f"`{package}`" in text for package in PACKAGES)


@pytest.mark.parametrize(
    "snippet", blocks("docs/reference/sdk.md", "python"), ids=lambda text: text.split("\n")[0][:40]
)
def test_examples_of_the_sdk(run: Run, snippet: str) -> None:
    whole = re.search("asyncio.run|barchan.sync", snippet) is not None
    script = snippet if whole else AROUND.format(textwrap.indent(snippet, " " * 12))
    done = run(script, [sys.executable, "-W", "error", "-"])
    assert done.returncode == 0, done.stderr
    assert not whole or done.stdout == "hello\n 3\n"
