"""Build hook: compiles native/ and puts the two static programs into the wheel, which is therefore tied to a platform."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAMS = ("guest", "spawner")


class NativeBuildHook(BuildHookInterface[Any]):
    """Runs `make` in native/. An editable install compiles nothing: `./dev` does, into src/barchan/_native."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        build = Path(self.directory) / "native"
        subprocess.run(
            ["make", "-s", "-C", str(Path(self.root) / "native"), f"BUILD={build.resolve()}"],
            check=True,
        )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
        for program in PROGRAMS:
            build_data["force_include"][str(build / program)] = f"barchan/_native/{program}"
