"""Inspect's own conformance checks of a sandbox provider, run on ours in an environment that holds Inspect.

Inspect brings some 90 packages and takes minutes to install, so it is no development dependency: it lives in a virtual environment
of its own outside the repository, made by the first run on a machine. Python imports barchan there from the source tree.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

import pytest

from tests.server import Server, exclusive

ROOT = Path(__file__).parents[2]
VERSION = "0.3.285"
CHECKS = 44
CACHE = Path(os.environ.get("BARCHAN_TEST_CACHE", "/var/cache/barchan/tests"))
NEEDED = (f"inspect-ai=={VERSION}", "aiohttp", "msgspec", "pytest", "pytest-asyncio")
PASSED_BY_ROOT = {
    "test_read_file_not_allowed",
    "test_write_text_file_without_permissions",
    "test_write_binary_file_without_permissions",
}
"""They expect that permission bits hold root back."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the environment that holds Inspect."""
    place = CACHE / f"inspect-ai-{VERSION}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(place.with_suffix(".lock")):
        if not (place / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
            install = [str(place / "bin/pip"), "install", "-q", "--disable-pip-version-check", *NEEDED]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"inspect-ai cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            (place / "complete").touch()
    return place / "bin/python"


def run_checks(python: Path, server: Server, environment: str, user: str, report: Path) -> str:
    """Runs them as a user of the sandbox. Returns what pytest printed."""
    checks = Path(__file__).with_name("inspect_checks.py")
    settings = report.with_name("pytest.ini")
    settings.write_text("[pytest]\nasyncio_mode = auto\nxfail_strict = true\n")
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", str(settings), f"--junitxml={report}"]
    done = subprocess.run(
        [str(python), "-m", "pytest", *options, str(checks)],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(report.parent),
            "PYTHONPATH": f"{ROOT}/src:{installed(report.parent)}",
            "BARCHAN_URL": f"unix:{server.data}/run/api.sock",
            "CHECKED_ENVIRONMENT": environment,
            "CHECKED_USER": user,
            "CHECKS_PASSED_BY_ROOT": " ".join(PASSED_BY_ROOT if user == "root" else ()),
        },
        cwd=report.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def installed(place: Path) -> Path:
    """What an installation of barchan would tell Inspect: that there is a plug-in."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["inspect_ai"]
    facts = place / "barchan-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: barchan\nVersion: 0\n")
    lines = [f"{name} = {module}" for name, module in points.items()]
    (facts / "entry_points.txt").write_text("\n".join(["[inspect_ai]", *lines, ""]))
    return place


@pytest.mark.parametrize("user", ["1000:1000", "root"])
def test_inspects_checks_of_a_sandbox(python: Path, server: Server, debian_env: str, tmp_path: Path, user: str) -> None:
    """All of them as an ordinary user; as root all but those that expect root to be held back, and those must fail."""
    printed = run_checks(python, server, debian_env, user, tmp_path / "report.xml")
    assert (tmp_path / "report.xml").exists(), printed
    outcomes = {case.attrib["name"]: outcome(case) for case in xml.parse(tmp_path / "report.xml").iter("testcase")}
    unlike = {name: got for name, got in outcomes.items() if got != expected(name, user)}
    assert not unlike, f"{unlike}\n{printed}"
    checks = Counter(got for name, got in outcomes.items() if not name.startswith("test_adapter_"))
    assert sum(checks.values()) == CHECKS, printed
    assert checks["pytest.xfail"] == (len(PASSED_BY_ROOT) if user == "root" else 0)


def test_the_samples_of_the_guide(python: Path) -> None:
    page = (ROOT / "docs/how-to/inspect.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run([str(python), "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def outcome(case: xml.Element) -> str:
    return next((f"{found.attrib.get('type', found.tag)}" for found in case if found.tag in KINDS), "passed")


KINDS = ("failure", "error", "skipped")


def expected(name: str, user: str) -> str:
    return "pytest.xfail" if user == "root" and name in PASSED_BY_ROOT else "passed"
