"""The native part's own tests, under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "native"


def test_native_tests_pass_under_sanitizers(tmp_path: Path) -> None:
    command = ["make", "-s", "-C", str(NATIVE), "test", f"BUILD={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
