"""Images unpacked by umoci, an independent reader of the same specification, beside what a sandbox would see of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from barchan.kernel import syscalls
from barchan.layers.mount import LayerMounts
from barchan.layers.sources import import_environment
from barchan.layers.stack import compose
from barchan.layers.store import LayerStore
from barchan.spec import EnvironmentRef
from tests import trees
from tests.disks import real_disk
from tests.images import Layout


@contextmanager
def place() -> Iterator[Path]:
    """A directory where both can work. Skips where one of them cannot."""
    if shutil.which("umoci") is None:
        pytest.skip("umoci is not installed")
    with real_disk(full=True) as path:
        yield path


@contextmanager
def overlay(work: Path, store: LayerStore, name: str) -> Iterator[Path]:
    """The environment as a sandbox sees it, mounted read-only where nobody else sees it."""
    layers = LayerMounts(work / "mnt", store)
    layers.prepare()
    (work / "empty").mkdir()
    with ExitStack() as stack:
        stack.callback(layers.unmount_all)
        fds = [syscalls.open_tree(work / "empty", clone=True)]
        fds = [*(layers.acquire(layer) for layer in compose(EnvironmentRef(base=name), store.resolve).layers), *fds]
        for fd in fds:
            stack.callback(os.close, fd)
        root = syscalls.new_mount("overlay", [("lowerdir+", fd) for fd in fds])
        stack.callback(os.close, root)
        yield Path(f"/proc/self/fd/{root}")


class Refused(Exception):
    """By umoci."""


def imported(data: Path, layers: Sequence[bytes]) -> None:
    with tempfile.TemporaryDirectory(dir=data) as name:
        Layout(Path(name) / "image").add("test", layers)
        import_environment(LayerStore(Path(name) / "layers"), "image", Path(name) / "image")


def compared(data: Path, layers: Sequence[bytes], way: str = "gzip") -> list[str]:
    """Where the two trees differ."""
    with tempfile.TemporaryDirectory(dir=data) as name:
        work = Path(name)
        layout, began = Layout(work / "image"), time.time() - 1
        layout.add("test", layers, way=way)
        umoci = ["umoci", "raw", "unpack", "--image", f"{work}/image:test", str(work / "theirs")]
        done = subprocess.run(umoci, capture_output=True, check=False)
        if done.returncode:
            raise Refused(done.stderr.decode())
        store = LayerStore(work / "layers")
        import_environment(store, "image", work / "image")
        with overlay(work, store, "image") as ours:
            mine = trees.describe(ours, began)
        return trees.differences(mine, trees.describe(work / "theirs", began))
