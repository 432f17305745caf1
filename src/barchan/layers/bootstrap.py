"""A Debian base layer made from packages: `debian-12`, `debian-13`.

mmdebstrap does the work, from the mirrors that the host's own apt uses. The layer is kept in a cache that outlives data
directories and clones, keyed by everything that went into it, so that it is fetched and made once:

    <cache>/<name>-<key>-<digest>/    a layer, as in the store
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from barchan.errors import CreateFailed, FeatureMissing, InvalidRequest, LayerCorrupt
from barchan.kernel import directories
from barchan.layers import content, erofs, refs
from barchan.layers.content import Format
from barchan.layers.store import Layer, LayerStore

SUITES = {"debian-12": "bookworm", "debian-13": "trixie"}
PACKAGES = ("ca-certificates", "patch", "python3", "python3-pytest")
CACHE = Path("/var/cache/barchan/bootstrap")
KEPT = 4
"""Layers in the cache; the least recently used go first."""
_DAY = 86400
_TARGET = "\0target"
_UNWANTED = ("doc", "info", "locale", "man")
_TIDY = """cd "$1"
rm -rf etc/resolv.conf etc/hostname var/cache/ldconfig/aux-cache var/lib/dbus/machine-id
rm -f var/log/*.log var/log/apt/*.log var/cache/debconf/*-old var/lib/dpkg/*-old etc/*-
find var/log -type f -exec truncate -s 0 {} +
: >etc/machine-id"""
"""Removes what mmdebstrap copied from the host, and what differs from run to run."""
_OPTIONS = (
    "--mode=root",
    "--format=directory",
    "--variant=minbase",
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
    format: Format = "split",
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
    key = f"{name}-{_key((*command, format))}"
    directories.make(cache, 0o755)
    with store.temporary() as work:
        layer = work / "layer"
        if not _from_cache(cache, key, layer):
            _make(command, cache, key, format, progress)
            if not _from_cache(cache, key, layer):
                raise CreateFailed(f"{cache} does not keep what is written to it", phase="bootstrap")
        progress(f"adding {content.read(layer).used >> 20} MiB to the layers")
        return store.add(layer, name, source=" ".join((suite, *sorted(packages))), kind="bootstrap")


def _command(suite: str, packages: tuple[str, ...], mirrors: Mirrors) -> tuple[str, ...]:
    """Complete but for the target, which stands where `_TARGET` is."""
    return ("mmdebstrap", *_OPTIONS, f"--include={','.join(packages)}", suite, _TARGET, *mirrors.lines(suite))


def _key(command: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]


def _from_cache(cache: Path, key: str, layer: Path) -> bool:
    """Copy the layer of that key; one whose bytes are not what its name says is thrown away."""
    for found in cache.glob(f"{key}-*"):
        try:
            shutil.copytree(found, layer)
            content.verify(layer, "sha256:" + found.name.removeprefix(f"{key}-"))
        except (LayerCorrupt, shutil.Error):
            shutil.rmtree(layer)
            shutil.rmtree(found, ignore_errors=True)
            continue
        os.utime(found)
        return True
    return False


def _make(command: tuple[str, ...], cache: Path, key: str, format: Format, progress: Callable[[str], None]) -> None:
    """Into the cache under its name only when it is complete."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=cache) as work:
        os.chmod(work, 0o755)
        tree, layer = Path(work) / "tree", Path(work) / "layer"
        _mmdebstrap(command, tree, progress)
        _empty_dev(tree)
        progress("converting to an EROFS image")
        # Later file times become the start of the day: the same packages on the same day give the same layer.
        erofs.build(tree, layer, epoch=int(time.time()) // _DAY * _DAY, format=format)
        target = cache / f"{key}-{refs.hex_of(content.read(layer).digest)}"
        if not target.exists():
            os.rename(layer, target)
    _bound(cache)


def _mmdebstrap(command: tuple[str, ...], tree: Path, progress: Callable[[str], None]) -> None:
    real = [str(tree) if word == _TARGET else word for word in command]
    env = {**os.environ, "LC_ALL": "C.UTF-8", "TMPDIR": str(tree.parent)}
    progress("making the base system with mmdebstrap")
    last: list[str] = []
    try:
        with subprocess.Popen(
            real, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env
        ) as process:
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


def _empty_dev(tree: Path) -> None:
    """Every sandbox gets its own /dev; a layer holds no devices."""
    dev = tree / "dev"
    if dev.is_symlink() or dev.stat().st_dev != tree.stat().st_dev:
        raise CreateFailed("mmdebstrap left a mount on /dev of the new system", phase="bootstrap")
    shutil.rmtree(dev)
    dev.mkdir(mode=0o755)


def _bound(cache: Path) -> None:
    layers = [path for path in cache.iterdir() if not path.name.startswith(".")]
    for path in sorted(layers, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


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
