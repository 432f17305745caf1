"""Packages of any Debian suite, fetched by apt without touching the host's own packages."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from barchan.layers.bootstrap import host_mirrors

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class Unavailable(Exception):
    """This host cannot get or run what a test needs; the text says what to do."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time, across test workers."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Apt:
    """apt with sources, lists and caches of its own."""

    def __init__(self, work: Path, suite: str) -> None:
        for name in ("lists/partial", "cache/archives/partial"):
            (work / name).mkdir(parents=True)
        mirror = host_mirrors().archive
        if not mirror:
            raise Unavailable("this host's apt has no Debian mirror to fetch packages from")
        source = f"deb [signed-by={_KEYRING}] {mirror} {suite} main\n"
        (work / "sources.list").write_text(source)
        (work / "status").touch()
        (work / "apt.conf").write_text(
            f'Dir::Etc::sourcelist "{work}/sources.list"; Dir::Etc::sourceparts "/dev/null";\n'
            f'Dir::State "{work}"; Dir::State::status "{work}/status"; Dir::Cache "{work}/cache";\n'
            'APT::Architecture "amd64"; APT::Architectures { "amd64"; }; Acquire::Languages "none"; APT::Sandbox::User "root";\n'
        )
        self._work = work
        self._run("apt-get", "-qq", "update")

    def _run(self, *command: str) -> str:
        env = {**os.environ, "APT_CONFIG": str(self._work / "apt.conf")}
        try:
            done = subprocess.run(
                command, cwd=self._work, env=env, capture_output=True, text=True, check=False, timeout=300
            )
        except (FileNotFoundError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"fetching packages needs apt and a mirror: {error}") from error
        if done.returncode:
            raise Unavailable(f"fetching packages needs a Debian mirror: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def names(self, beginning: str) -> set[str]:
        return set(self._run("apt-cache", "pkgnames", beginning).split())

    def show(self, package: str) -> str:
        """What the suite says about the newest version of a package."""
        return self._run("apt-cache", "show", "--no-all-versions", package)

    def unpack(self, packages: list[str]) -> Path:
        """These packages alone, in one tree; nothing of them is run."""
        self._run("apt-get", "-qq", "download", *packages)
        return self._unpacked(self._work)

    def unpack_with_libraries(self, package: str) -> Path:
        """With all that it depends on."""
        self._run("apt-get", "-qq", "-y", "install", "--download-only", "--no-install-recommends", package)
        return self._unpacked(self._work / "cache/archives")

    def _unpacked(self, archives: Path) -> Path:
        root = self._work / "root"
        for archive in sorted(archives.glob("*.deb")):
            self._run("dpkg", "-x", str(archive), str(root))
        return root
