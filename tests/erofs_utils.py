"""A newer mkfs.erofs than the host's: Debian's own from another suite, with its libraries beside it, and cached.

<CACHE>/<suite>/<version>/bin/mkfs.erofs   runs the one of that suite; complete, because it is renamed into place
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from tests.debian import Apt, Unavailable, locked

CACHE = Path("/var/cache/barchan/erofs-utils")
_LIBRARIES, _PROGRAM = "usr/lib/x86_64-linux-gnu", "usr/bin/mkfs.erofs"


def fetch(suite: str) -> Path:
    """The directory of its programs, for PATH. Raises `Unavailable`."""
    place = CACHE / suite
    place.mkdir(parents=True, exist_ok=True)
    with locked(place / ".lock"):
        found = next((path for path in place.iterdir() if not path.name.startswith(".")), None)
        return (found or _download(suite, place)) / "bin"


def _download(suite: str, place: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix="barchan-apt-", dir="/var/tmp") as work:
        apt = Apt(Path(work), suite)
        version = re.search(r"^Version: (\S+)", apt.show("erofs-utils"), re.MULTILINE)
        if version is None:
            raise Unavailable(f"{suite} has no erofs-utils")
        root = apt.unpack_with_libraries("erofs-utils")
        target, part = place / version[1], place / f".{version[1]}.part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(root / _LIBRARIES, part / _LIBRARIES, symlinks=True)
        (part / _PROGRAM).parent.mkdir()
        shutil.copy(root / _PROGRAM, part / _PROGRAM)
        (part / "bin").mkdir()
        wrapper = part / "bin/mkfs.erofs"
        libraries = target / _LIBRARIES
        command = f"{libraries}/ld-linux-x86-64.so.2 --library-path {libraries} {target / _PROGRAM}"
        wrapper.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        wrapper.chmod(0o755)
        part.rename(target)
        return target
