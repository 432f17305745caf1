"""Debian kernels to boot in a virtual machine: fetched by apt without touching the host's own packages, and cached.

<CACHE>/kernels/<suite>/<release>/   complete, because it is renamed into place
  vmlinuz
  boot/<nn>-<name>.ko                uncompressed, in the order in which they must be loaded
  more/<nn>-<name>.ko                loaded when a test asks for them
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.debian import Apt, Unavailable, locked

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
        apt = Apt(Path(work), suite)
        release = _release(apt)
        target = place / release
        if not target.exists():
            known = apt.names("linux-")
            root = apt.unpack([name for name in _packages(release) if name in known])
            _keep(root, release, target)
        os.utime(target)
        return target


def _release(apt: Apt) -> str:
    """What the suite's metapackage stands for."""
    text = apt.show("linux-image-cloud-amd64")
    found = re.search(r"\blinux-image-(\d\S*cloud-amd64)", text)
    if found is None:
        raise Unavailable(f"no cloud kernel in this suite: {text}")
    return found[1]


def _packages(release: str) -> tuple[str, ...]:
    """Until trixie one package holds image and modules; later ones are split."""
    return tuple(f"linux-{part}-{release}" for part in ("image", "binary", "modules"))


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
