"""The demo gives the rewards that it should, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from tests.server import remove

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def of_another_version(registry: Path) -> None:
    """As if other tables were in it."""
    connection = apsw.Connection(str(registry))
    connection.execute("ALTER TABLE sandboxes ADD COLUMN other TEXT NOT NULL DEFAULT ''")
    connection.pragma("user_version", 1)
    connection.close()


def test_the_demo(data_dir: Path, debian_env: str) -> None:
    cache = data_dir.with_name(f"{data_dir.name}-demo")
    env = {**os.environ, "BARCHAN_CACHE": str(cache)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "examples.swe_demo"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "16 agents, 8 rewarded, 16 verdicts as expected" in done.stdout
        assert str(cache) not in Path("/proc/self/mountinfo").read_text()
        of_another_version(cache / "demo/node.db")
        again = subprocess.run(
            [sys.executable, "-m", "examples.swe_demo"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        assert again.returncode == 0, again.stdout + again.stderr
        assert "16 verdicts as expected" in again.stdout and "made anew" in again.stderr
    finally:
        remove(cache / "demo")
        shutil.rmtree(cache, ignore_errors=True)
