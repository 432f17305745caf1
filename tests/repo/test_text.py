"""What must not be in any file of the repository."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def files() -> list[Path]:
    """Every file that is, or would be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / name for name in sorted(set(listed.stdout.split("\0"))) if name)
    return [path for path in paths if path.is_file() and path.stat().st_size < 1_000_000]


@cache
def package_hosts() -> frozenset[str]:
    """Hosts from which this machine's own apt and pip fetch; a mirror elsewhere has another name."""
    from pip._internal.models.index import PyPI

    sources = [path for end in ("*.list", "*.sources") for path in Path("/etc/apt").rglob(end)]
    text = "\n".join([*(path.read_text() for path in sources), PyPI.url])
    return frozenset(host for host in re.findall(r"https?://([\w.-]+)", text) if "." in host)


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return ""


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_file_names_no_machine(path: Path) -> None:
    text = text_of(path)
    assert not re.search(rf"{re.escape(str(ROOT))}\b", text), "a path of the machine it was written on"
    assert not re.search(r"\.\." r"/shared\b", text), "a path outside the repository"
    assert not [host for host in package_hosts() if host in text], (
        "package hosts come from apt's and pip's own settings"
    )


def test_python_files_have_no_bare_except() -> None:
    bare = re.compile(r"^\s*except\s*:", re.MULTILINE)
    assert not [path for path in files() if path.suffix == ".py" and bare.search(text_of(path))]


def test_license_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
