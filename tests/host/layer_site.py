"""A store with images made byte by byte, the commands on it, and what the kernel shows of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from barchan.config import Layout as DataLayout
from barchan.errors import InvalidRequest
from barchan.kernel import syscalls
from barchan.layers.attach import attach
from barchan.layers.sources import import_environment
from barchan.layers.stack import compose
from barchan.layers.store import LayerStore
from barchan.spec import EnvironmentRef
from tests import trees
from tests.disks import real_disk
from tests.images import Layout, Member, tar

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
LATER = 1 << 40


class Site:
    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "data"
        self.data.mkdir(0o700)
        self.store = LayerStore(DataLayout(self.data).layers)
        (root / "empty").mkdir()
        self._number = 0

    def fresh(self, what: str) -> str:
        self._number += 1
        return f"{what}-{self._number}"

    def image(self, name: str, layers: Sequence[Sequence[Member]], **more: Any) -> str:
        """Its digest."""
        root = self.root / self.fresh("image")
        Layout(root).add("", [tar(layer) for layer in layers], **more)
        return import_environment(self.store, name, root).digest

    def accepted(self, name: str, layers: Sequence[Sequence[Member]]) -> list[Sequence[Member]]:
        """As `image`, without the members at the end that the import refuses. Returns what was taken."""
        taken = list(layers)
        while True:
            try:
                self.image(name, taken)
            except InvalidRequest:
                taken = [*taken[:-1], taken[-1][:-1]] if taken[-1] else taken[:-1]
            else:
                return taken

    @contextmanager
    def overlay(self, ref: str) -> Iterator[Path]:
        """As a sandbox sees it, read-only."""
        with ExitStack() as stack:
            fds = [
                self._mounted(stack, layer.path)
                for layer in compose(EnvironmentRef(base=ref), self.store.resolve).layers
            ]
            fds.append(syscalls.open_tree(self.root / "empty", clone=True))
            stack.callback(os.close, fds[-1])
            root = syscalls.new_mount("overlay", [("lowerdir+", fd) for fd in fds])
            stack.callback(os.close, root)
            yield Path(f"/proc/self/fd/{root}")

    def _mounted(self, stack: ExitStack, image: Path) -> int:
        fd = attach(image / "image", image / "data")
        stack.callback(os.close, fd)
        return fd

    def seen(self, ref: str) -> trees.Described:
        with self.overlay(ref) as root:
            return trees.describe(root, LATER)

    def command(self, *argv: str | bytes) -> list[str]:
        return [sys.executable, "-m", "barchan.cli.main", "layer", *map(os.fsdecode, argv), "--data", str(self.data)]

    def run(self, *argv: str | bytes, code: int = 0) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(self.command(*argv), capture_output=True, timeout=100, check=False)
        assert done.returncode == code, done.stderr.decode()
        return done

    def held(self) -> list[str]:
        """Mounts of this place, of everybody."""
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line for line in lines if str(self.root) in line]


@contextmanager
def opened() -> Iterator[Site]:
    with real_disk(full=True) as path:
        site = Site(path)
        yield site
        assert not site.held()
        assert not list((site.store.root / "tmp").iterdir())
