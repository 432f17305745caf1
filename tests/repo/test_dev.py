"""The script for everything, where it cannot work."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534


def test_the_clone_of_another_user_is_left_alone() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: becomes another user")
    if not all(path.stat().st_mode & stat.S_IXOTH for path in (ROOT, *ROOT.parents)):
        pytest.skip("the clone lies where other users cannot go")
    done = subprocess.run(
        ["./dev", "setup"], cwd=ROOT, user=NOBODY, group=NOBODY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert f"dev: {ROOT} belongs to " in done.stderr
