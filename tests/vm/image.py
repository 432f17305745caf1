"""What a test machine has besides its kernel: a Debian root, this working tree with its Python packages, an empty disk."""

from __future__ import annotations

import compileall
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from py_compile import PycInvalidationMode

from packaging.requirements import Requirement

from barchan.errors import BarchanError
from barchan.layers import erofs
from barchan.layers.bootstrap import bootstrap
from barchan.layers.store import LayerStore
from tests.debian import Unavailable, locked
from tests.vm.kernel import CACHE

ROOT = Path(__file__).parents[2]
PACKAGES = ("btrfs-progs", "busybox-static", "erofs-utils", "iproute2", "kmod", "procps", "python3", "xfsprogs")
BASES = {(3, 11): "debian-12", (3, 13): "debian-13"}
"""The host's compiled Python packages must run inside: the release with the same Python."""
TOPS = ("aiohttp", "apsw", "click", "crc32c", "msgspec", "pytest", "pytest-asyncio", "pytest-timeout", "rich", "uvloop")
"""What barchan and its tests need; what these need comes with them."""
DISK = 8 << 30
_MODE = PycInvalidationMode.UNCHECKED_HASH
"""File times are not kept."""


def base(directory: Path) -> Path:
    """A Debian root as one EROFS image. Made once per host, in the minute that mmdebstrap takes."""
    name = BASES.get(sys.version_info[:2])
    if name is None:
        raise Unavailable(f"no Debian has Python {sys.version_info[0]}.{sys.version_info[1]}: use 3.11 or 3.13")
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with locked(CACHE / ".lock"):
            return (
                bootstrap(LayerStore(directory), name, packages=PACKAGES, cache=CACHE / "bases", format="packed").path
                / "image"
            )
    except BarchanError as error:
        raise Unavailable(f"no Debian root for virtual machines: {error}") from error


def tree(directory: Path) -> Path:
    """This working tree as it is now: src, tests, built native programs, and `site` with the Python packages."""
    stage, layer = directory / "stage", directory / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_cache")
    for part in ("src", "tests", "native/build"):
        shutil.copytree(ROOT / part, stage / part, ignore=ignore, symlinks=True)
    for file in packaged(TOPS):
        target = stage / "site" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(file.locate()), target)
    # A test machine takes half a minute to compile what this host compiles in seconds.
    compileall.compile_dir(
        stage, quiet=2, workers=2, stripdir=str(stage), prependdir="/opt/tree", invalidation_mode=_MODE
    )
    erofs.build(stage, layer, epoch=0, format="packed")
    shutil.rmtree(stage)
    return layer / "image"


def packaged(names: Iterable[str]) -> Iterator[importlib.metadata.PackagePath]:
    """Files of the named packages and of all that they require here; no scripts."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower()
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        required = (Requirement(text) for text in found.requires or ())
        waiting += [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
        for file in found.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                yield file


def disk(directory: Path) -> Path:
    """An empty ext4 that takes room only as it fills."""
    image = directory / "work.ext4"
    with image.open("wb") as file:
        file.truncate(DISK)
    command = ("mke2fs", "-q", "-F", "-t", "ext4", "-E", "lazy_itable_init=1,lazy_journal_init=1", str(image))
    try:
        subprocess.run(command, capture_output=True, check=True)
    except FileNotFoundError as error:
        raise Unavailable("virtual machines need e2fsprogs") from error
    return image
