"""The task: a real package with one bug seeded by a patch, cut into the layers that sandboxes are made of.

debian-12            base, shared by everybody
swe-workspace        the sdist with the bug in, without the two tests that show it
swe-tools            what the agents work with
swe-hidden           the whole test suite and its runner; only the verifier's sandboxes have it
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from barchan import EnvironmentRef

HERE = Path(__file__).parent
REPO = "/repo"
PACKAGE = f"{REPO}/src/cachetools"
BASE = "debian-12"

AGENT = EnvironmentRef(base=BASE, workspace="swe-workspace", toolkits=("swe-tools",))
VERIFIER = EnvironmentRef(base=BASE, workspace="swe-workspace", toolkits=("swe-hidden",))
RUN_PUBLIC_TESTS = ("python3", "-m", "unittest", "discover", "-q", "-s", "tests", "-t", ".")
REPORT = "/tmp/passed"
RUN_HIDDEN_TESTS = ("python3", "/opt/verifier/verify.py", "tests", REPORT)
EXPECTED = frozenset((HERE / "expected.txt").read_text().split())


def fingerprint() -> str:
    """Changes when a layer would."""
    files = sorted(path for path in HERE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def fetch(cache: Path) -> Path:
    """The sdist, unpacked; downloaded once, its digest checked by pip."""
    source = cache / "cachetools-5.5.2"
    if not source.exists():
        cache.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download", "--no-deps"]
        wanted = ["--no-binary", "cachetools", "-r", str(HERE / "requirements.txt"), "-d", str(cache)]
        subprocess.run([*pip, *wanted], check=True)
        subprocess.run(["tar", "-C", str(cache), "-xf", str(cache / "cachetools-5.5.2.tar.gz")], check=True)
    return source


def layers(source: Path, out: Path) -> dict[str, Path]:
    """Directory trees by layer name, made anew below `out`."""
    shutil.rmtree(out, ignore_errors=True)
    trees = {name: out / name for name in ("swe-workspace", "swe-tools", "swe-hidden")}
    workspace = trees["swe-workspace"] / "repo"
    shutil.copytree(source, workspace)
    shutil.copy(HERE / "ISSUE.md", workspace)
    # Without the ceiling, git would take a repository further up for the one to patch, and skip every file.
    ceiling = {**os.environ, "GIT_CEILING_DIRECTORIES": str(workspace.parent.resolve())}
    subprocess.run(["git", "apply", str(HERE / "bug.patch")], cwd=workspace, check=True, env=ceiling)
    shutil.copytree(HERE / "tools", trees["swe-tools"])
    shutil.copytree(source / "tests", trees["swe-hidden"] / "repo/tests")
    verifier = trees["swe-hidden"] / "opt/verifier"
    verifier.mkdir(parents=True)
    shutil.copy(HERE / "verify.py", verifier)
    return trees
