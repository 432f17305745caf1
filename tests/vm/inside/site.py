"""Run in a test machine: what its programs share."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tests.e2e.conftest import make_tiny
from tests.host.spawn_site import NATIVE, PROGRAMS
from tests.server import Server

DATA = Path("/var/tmp/data")


def make_environment() -> None:
    """`tiny` with the attack programs, unless it is there."""
    known = Server(DATA).run("env", "ls")
    if '"tiny"' in json.dumps(known):
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        root = make_tiny(Path(place) / "tiny")
        for name in PROGRAMS:
            shutil.copy(NATIVE / "build" / name, root / "bin" / name)
        Server(DATA).run("env", "import", "tiny", str(root))
