"""The wheel holds the native programs, and an sdist is enough to make it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(out), cwd=ROOT)
    (made,) = out.glob("barchan-*.tar.gz")
    return made


def run(*argv: str, cwd: Path) -> None:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sdist_holds_sources_and_no_binaries(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"native/Makefile", "native/frames.h", "src/barchan/spec.py", "LICENSE", "dev"} <= names
    assert not [name for name in names if "_native/" in name or name.startswith("native/build/")]


def test_wheel_from_the_sdist_holds_the_programs(sdist: Path, tmp_path: Path) -> None:
    run("tar", "-xf", str(sdist), cwd=tmp_path)
    (source,) = tmp_path.iterdir()
    pip = [sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    run(*pip, cwd=source)
    (wheel,) = tmp_path.glob("barchan-*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        for program in ("guest", "spawner"):
            assert archive.read(f"barchan/_native/{program}").startswith(b"\x7fELF")
        assert "barchan/py.typed" in archive.namelist()
