"""Where tests keep what they mount, and file systems of their own to be filled."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan.config import Layout
from barchan.kernel import probe
from tests import server


@contextmanager
def real_disk(*, full: bool = False) -> Iterator[Path]:
    """A new directory whose file system holds images that are mounted from their file. `full`: only on a kernel with all abilities."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    disks = server.disks()
    if not disks:
        pytest.skip("no file system here can hold images that are mounted from their file")
    path = Path(tempfile.mkdtemp(prefix="barchan-disk-", dir=disks[0]))
    try:
        if full and probe.examine(Layout(path / "probe")).kernel != "full":
            pytest.skip("this kernel mounts no image from its file, or takes no layers by descriptor")
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """`place` becomes a tmpfs of `size`, such as `1m`."""
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)
