"""The fuzz targets: what each is built from, the bug that it must find, and the share of its parser that the corpus reaches.

A seeded bug is one line of the product, put into a copy of the sources before they are built; the product holds none. The kept
corpus alone must not hit it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = ("-max_len=4096", "-timeout=20", "-rss_limit_mb=1024")


@dataclass(frozen=True)
class Bug:
    file: str
    right: str
    wrong: str


@dataclass(frozen=True)
class Target:
    """One program that takes libFuzzer's options."""

    name: str
    parsers: tuple[str, ...]
    """The files of which the coverage figure speaks."""
    floor: float
    """Per cent of their lines that the kept corpus runs."""
    bug: Bug

    @property
    def native(self) -> bool:
        return not self.name.startswith("host_")

    @property
    def corpus(self) -> Path:
        return ROOT / ("native/fuzz" if self.native else "tests/fuzz") / "corpus" / self.name

    def build(self, build: Path, sources: Path = ROOT) -> None:
        """`sources` holds native/ and src/."""
        build.mkdir(parents=True, exist_ok=True)
        if self.native:
            run(["make", "-s", "-C", str(sources / "native/fuzz"), self.name, f"BUILD={build}"])
            return
        script = build / self.name
        program = f"'{sys.executable}' -m tests.fuzz.python_target {self.name} {script}"
        script.write_text(f"#!/bin/sh\nPYTHONPATH='{sources / 'src'}:{ROOT}' exec {program} \"$@\"\n")
        script.chmod(0o755)

    def command(self, build: Path) -> list[str]:
        if not self.native:
            return [str(build / self.name), *BOUNDS]
        words = ROOT / f"native/fuzz/{self.name}.dict"
        return [str(build / self.name), *BOUNDS, "-malloc_limit_mb=64", *([f"-dict={words}"] if words.exists() else [])]

    def seeded(self, place: Path) -> Path:
        """Sources with the bug, below `place`."""
        file = place / self.bug.file
        ignored = shutil.ignore_patterns("build", "corpus", "_native", "__pycache__")
        shutil.copytree(ROOT / "native", place / "native", ignore=ignored)
        shutil.copytree(ROOT / "src", place / "src", ignore=ignored)
        text = file.read_text()
        assert text.count(self.bug.right) == 1, f"{self.bug.file} changed: seed the bug of '{self.name}' anew"
        file.write_text(text.replace(self.bug.right, self.bug.wrong))
        return place


def run(command: list[str], **environment: str) -> str:
    """Its output. Raises `AssertionError` with it when the command fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    text = done.stdout.decode(errors="replace")
    assert done.returncode == 0, f"{' '.join(command)}\n{text[-6000:]}"
    return text


TARGETS = {
    target.name: target
    for target in (
        Target(
            "link",
            ("link.c", "link_parse.c", "ops.c"),
            88,
            Bug("native/ops.c", "offset > in->received ||", "offset > in->received + 1 ||"),
        ),
        Target(
            "requests",
            ("requests.c",),
            95,
            Bug("native/bytes.c", "memchr(s.data, 0, s.size)", "memchr(s.data, 0, s.size - 1)"),
        ),
        Target(
            "tree",
            ("tree_put.c", "tree_format.c"),
            80,
            Bug("native/tree_format.c", "size > NAME_MAX", "size > NAME_MAX + 1"),
        ),
        Target(
            "accounts",
            ("accounts.c",),
            95,
            Bug("native/accounts.c", "f.size >= room", "f.size > room"),
        ),
        Target(
            "processes",
            ("process_format.c",),
            95,
            Bug("native/process_format.c", "(uint8_t)state[8]", "(uint8_t)state[9]"),
        ),
        Target(
            "spawn",
            ("spawn_parse.c",),
            95,
            Bug("native/spawn_parse.c", "return id < head->uid_base ||", "return id <= head->uid_base ||"),
        ),
        Target(
            "shell",
            ("shell.c",),
            95,
            Bug("native/shell.c", "digits < REPORT_MAX)", "digits <= REPORT_MAX)"),
        ),
        Target(
            "paths",
            ("paths.c",),
            80,
            Bug("native/paths.c", "if (size > NAME_MAX)", "if (size > NAME_MAX + 1)"),
        ),
        Target(
            "host_guest",
            ("wire/frames.py", "wire/guest.py", "node/channel.py", "node/operation.py"),
            78,
            Bug("src/barchan/wire/guest.py", "if self.left < layout.size:", "if self.left + 1 < layout.size:"),
        ),
        Target(
            "host_link",
            ("wire/link.py", "wire/streams.py", "wire/messages.py", "wire/websocket.py"),
            72,
            Bug("src/barchan/wire/frames.py", "if len(payload) < 8:", "if len(payload) < 7:"),
        ),
    )
}
FIRST = ("link", "requests", "tree", "spawn", "shell")
SECOND = ("host_guest", "host_link", "accounts", "processes", "paths")
"""Halves for two test files, which run at the same time."""
