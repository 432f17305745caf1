"""A Debian base layer made from packages: `debian-12`, `debian-13`.

mmdebstrap does the work, from the mirrors that the host's own apt uses. The result is kept as a tar, keyed by everything
that went into it, so that it is fetched once.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from barchan.errors import CreateFailed, FeatureMissing, InvalidRequest
from barchan.layers.sources import import_layer
from barchan.layers.store import Layer, LayerStore

SUITES = {"debian-12": "bookworm", "debian-13": "trixie"}
PACKAGES = ("ca-certificates", "patch", "python3", "python3-pytest")
CACHE = Path("/var/cache/barchan/bootstrap")
KEPT = 4
"""Tars in the cache; the least recently used go first."""
_DAY = 86400
_UNWANTED = ("doc", "info", "locale", "man")
_TIDY = """cd "$1"
rm -rf etc/resolv.conf etc/hostname var/cache/ldconfig/aux-cache var/lib/dbus/machine-id
rm -f var/log/*.log var/log/apt/*.log var/cache/debconf/*-old var/lib/dpkg/*-old etc/*-
find var/log -type f -exec truncate -s 0 {} +
: >etc/machine-id"""
"""Removes what mmdebstrap copied from the host, and what differs from run to run."""
_OPTIONS = (
    "--mode=root",
    "--format=tar",
    "--variant=minbase",
    "--skip=output/dev,output/mknod",
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _UNWANTED),
    "--dpkgopt=path-include=/usr/share/locale/locale.alias",
    f"--customize-hook=set -e; {_TIDY}",
)
_SOURCES = Path("/etc/apt")


class Mirrors(msgspec.Struct, frozen=True):
    """Where the host gets its packages; "" when its configuration does not say."""

    archive: str = ""
    security: str = ""

    def lines(self, suite: str) -> tuple[str, ...]:
        """For apt's sources.list; none means mmdebstrap's own default."""
        if not self.archive:
            return ()
        lines = [f"deb {self.archive} {suite} main", f"deb {self.archive} {suite}-updates main"]
        return (*lines, f"deb {self.security} {suite}-security main") if self.security else tuple(lines)


def bootstrap(
    store: LayerStore,
    name: str,
    *,
    packages: Iterable[str] = PACKAGES,
    cache: Path = CACHE,
    progress: Callable[[str], None] = lambda line: None,
) -> Layer:
    """Make `debian-12` or `debian-13` a layer of the store. Takes a minute and the network when it is not cached.

    `progress` gets one line of text at a time. Raises `InvalidRequest` for another name, `FeatureMissing` without
    mmdebstrap, `CreateFailed` with its last words when it fails.
    """
    suite = SUITES.get(name)
    if suite is None:
        raise InvalidRequest(f"cannot bootstrap {name!r}", field="name", hint="known: " + ", ".join(SUITES))
    mirrors = host_mirrors()
    command = _command(suite, tuple(sorted(packages)), mirrors)
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    tar = cache / f"{name}-{_key(command)}.tar"
    if tar.exists():
        progress(f"using {tar}")
        os.utime(tar)
    else:
        _make(command, tar, progress)
        _bound(cache)
    progress(f"converting {tar.stat().st_size >> 20} MiB to a layer")
    return import_layer(store, name, tar, kind="bootstrap")


def _command(suite: str, packages: tuple[str, ...], mirrors: Mirrors) -> tuple[str, ...]:
    return ("mmdebstrap", *_OPTIONS, f"--include={','.join(packages)}", suite, "-", *mirrors.lines(suite))


def _key(command: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]


def _make(command: tuple[str, ...], tar: Path, progress: Callable[[str], None]) -> None:
    """Into the cache under its name only when it is complete."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=tar.parent) as work:
        part = Path(work) / "tar"
        os.chmod(work, 0o755)
        _mmdebstrap(command, part, Path(work), progress)
        os.replace(part, tar)


def _mmdebstrap(command: tuple[str, ...], out: Path, work: Path, progress: Callable[[str], None]) -> None:
    # Later file times become the start of the day: the same packages on the same day give the same layer.
    env = {**os.environ, "LC_ALL": "C.UTF-8", "TMPDIR": str(work), "SOURCE_DATE_EPOCH": str(_today())}
    progress("running " + shlex.join(("mmdebstrap", *command[-4:])))
    last: list[str] = []
    try:
        with out.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE, env=env) as process:
            assert process.stderr
            for raw in process.stderr:
                line = raw.decode(errors="replace").rstrip()
                last = [*last[-11:], line]
                progress(line)
    except FileNotFoundError as error:
        raise FeatureMissing("mmdebstrap is not installed", hint="install mmdebstrap", phase="bootstrap") from error
    if process.returncode:
        raise CreateFailed(
            "mmdebstrap failed: " + " | ".join(last),
            hint="check the network and the host's apt sources",
            phase="bootstrap",
        )


def _today() -> int:
    return int(time.time()) // _DAY * _DAY


def _bound(cache: Path) -> None:
    tars = sorted(cache.glob("*.tar"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in tars[KEPT:]:
        path.unlink(missing_ok=True)


def host_mirrors(root: Path = _SOURCES) -> Mirrors:
    """What the apt configuration below `root` uses."""
    files = [root / "sources.list", *sorted((root / "sources.list.d").glob("*.list"))]
    entries = [entry for path in files if path.is_file() for entry in parse_list(path.read_text())]
    for path in sorted((root / "sources.list.d").glob("*.sources")):
        entries += parse_sources(path.read_text())
    return choose(entries)


def choose(entries: Iterable[tuple[str, str]]) -> Mirrors:
    """Pure: from (URI, suite) pairs, the archive that has `<suite>-updates` and the one that has `<suite>-security`."""
    found = tuple(entries)
    archive = next((uri for uri, suite in found if suite.endswith("-updates")), "")
    security = next((uri for uri, suite in found if suite.endswith("-security")), "")
    return Mirrors(archive, security if archive else "")


def parse_list(text: str) -> list[tuple[str, str]]:
    """One-line style: `deb [options] URI suite components…`."""
    found = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words[:1] != ["deb"]:
            continue
        words = words[1:]
        if words and words[0].startswith("["):
            closing = next((i for i, word in enumerate(words) if word.endswith("]")), len(words))
            words = words[closing + 1 :]
        if len(words) >= 2:
            found.append((words[0], words[1]))
    return found


def parse_sources(text: str) -> list[tuple[str, str]]:
    """deb822 style: stanzas with Types, URIs and Suites."""
    found = []
    for stanza in text.split("\n\n"):
        lines = (line.partition(":") for line in stanza.splitlines() if not line.startswith("#"))
        fields = {key.strip().lower(): value.split() for key, _, value in lines}
        if "deb" in fields.get("types", ()) and fields.get("enabled", ["yes"]) != ["no"]:
            found += [(uri, suite) for uri in fields.get("uris", ()) for suite in fields.get("suites", ())]
    return found
