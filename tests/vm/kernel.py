"""Debian kernels to boot in a virtual machine: fetched by apt without touching the host's own packages, and cached.

<CACHE>/kernels/<suite>/<release>/   complete, because it is renamed into place
  vmlinuz
  boot/<nn>-<name>.ko                uncompressed, in the order in which they must be loaded
  more/<nn>-<name>.ko                loaded when a test asks for them
"""

from __future__ import annotations

import fcntl
import lzma
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from barchan.layers.bootstrap import host_mirrors

CACHE = Path("/var/cache/barchan/vm")
AT_BOOT = (
    "virtio_mmio",
    "virtio_blk",
    "virtio_console",
    "crc32c-intel",
    "crc32c-cryptoapi",
    "loop",
    "erofs",
    "overlay",
    "btrfs",
)
ON_REQUEST = ("xfs", "veth", "bridge", "nf_tables", "af_alg", "vsock")
"""Names that a kernel has built in or lacks are left out, what they depend on comes before them. A large module takes
seconds to load: XFS more than twenty on a busy host."""
FRESH = 7 * 86400
"""Seconds for which a cached kernel is taken without asking the mirror for a newer one."""
KEPT = 2
"""Releases per suite."""
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class Unavailable(Exception):
    """This host cannot get or run what a virtual machine needs; the text says what to do."""


@dataclass(frozen=True)
class Kernel:
    suite: str
    release: str
    image: Path
    modules: tuple[Path, ...]
    """Loaded at boot, in this order."""
    more: tuple[Path, ...]
    """What `/vm/load` in the machine loads."""


def fetch(suite: str) -> Kernel:
    """The newest cloud kernel of a suite, at most `FRESH` seconds out of date; older where no mirror answers."""
    place = CACHE / "kernels" / suite
    place.mkdir(parents=True, exist_ok=True)
    with locked(place / ".lock"):
        found = _newest(place)
        if found is None or time.time() - found.stat().st_mtime > FRESH:
            try:
                found = _download(suite, place)
            except Unavailable:
                if found is None:
                    raise
        _bound(place)
    modules, more = (tuple(sorted((found / part).glob("*.ko"))) for part in ("boot", "more"))
    return Kernel(suite, found.name, found / "vmlinuz", modules, more)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time, across test workers."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _releases(place: Path) -> list[Path]:
    return sorted((path for path in place.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)


def _newest(place: Path) -> Path | None:
    return next(reversed(_releases(place)), None)


def _bound(place: Path) -> None:
    for old in _releases(place)[:-KEPT]:
        shutil.rmtree(old)


def _download(suite: str, place: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix="barchan-apt-", dir="/var/tmp") as work:
        os.chmod(work, 0o755)
        apt = _Apt(Path(work), suite)
        release = apt.release()
        target = place / release
        if not target.exists():
            root = apt.unpack([name for name in _packages(release) if name in apt.names()])
            _keep(root, release, target)
        os.utime(target)
        return target


def _packages(release: str) -> tuple[str, ...]:
    """Until trixie one package holds image and modules; later ones are split."""
    return tuple(f"linux-{part}-{release}" for part in ("image", "binary", "modules"))


class _Apt:
    """apt with sources, lists and caches of its own."""

    def __init__(self, work: Path, suite: str) -> None:
        for name in ("lists/partial", "cache/archives/partial"):
            (work / name).mkdir(parents=True)
        mirror = host_mirrors().archive
        if not mirror:
            raise Unavailable("this host's apt has no Debian mirror to fetch a kernel from")
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
            raise Unavailable(f"fetching a kernel needs apt and a mirror: {error}") from error
        if done.returncode:
            raise Unavailable(f"fetching a kernel needs a Debian mirror: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def names(self) -> set[str]:
        return set(self._run("apt-cache", "pkgnames", "linux-").split())

    def release(self) -> str:
        """What the suite's metapackage stands for."""
        text = self._run("apt-cache", "show", "--no-all-versions", "linux-image-cloud-amd64")
        found = re.search(r"\blinux-image-(\d\S*cloud-amd64)", text)
        if found is None:
            raise Unavailable(f"no cloud kernel in this suite: {text}")
        return found[1]

    def unpack(self, packages: list[str]) -> Path:
        self._run("apt-get", "-qq", "download", *packages)
        root = self._work / "root"
        for archive in sorted(self._work.glob("*.deb")):
            self._run("dpkg", "-x", str(archive), str(root))
        return root


def _keep(root: Path, release: str, target: Path) -> None:
    """Image and modules of an unpacked package, in place only when they are complete."""
    part = target.with_name(f".{release}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    image = next(path for path in (root / "boot" / f"vmlinuz-{release}", *root.rglob("vmlinuz*")) if path.is_file())
    shutil.copyfile(image, part / "vmlinuz")
    modules = {plain(path): read_module(path) for path in root.rglob("*.ko*") if path.is_file()}
    first = load_order(AT_BOOT, modules)
    later = [name for name in load_order(AT_BOOT + ON_REQUEST, modules) if name not in first]
    for kind, names in (("boot", first), ("more", later)):
        (part / kind).mkdir()
        for number, name in enumerate(names):
            (part / kind / f"{number:02}-{name}.ko").write_bytes(modules[name])
    part.rename(target)


def plain(path: Path) -> str:
    """A module's name: dashes and underscores are the same to the kernel."""
    return path.name.partition(".ko")[0].replace("-", "_")


def read_module(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def load_order(wanted: tuple[str, ...], modules: dict[str, bytes]) -> list[str]:
    """Pure: the wanted modules that exist and all they depend on, each after its own dependencies."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name in order or name not in modules:
            return
        for needed in needs(modules[name]):
            visit(needed.replace("-", "_"))
        order.append(name)

    for name in wanted:
        visit(name.replace("-", "_"))
    return order


def needs(module: bytes) -> list[str]:
    """The list that depmod would read from the module itself."""
    found = re.search(rb"\0depends=([^\0]*)\0", module)
    return [name for name in (found[1].decode().split(",") if found else ()) if name]
