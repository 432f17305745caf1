"""Each layer mounted once per host, and handed out as detached clones of that one mount.

    DATA/mnt/            private: what is mounted below does not propagate to other mount namespaces
      lock               held while a layer is mounted or unmounted
      <hex>/             the mount of the layer sha256:<hex>

Two mounts of one image file would be two superblocks without a common page cache, so the mounts outlive the agent and
are found again by their path. Kernels below 6.12 mount no files: read-only loop devices stand between (`reduced`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from barchan.errors import FeatureMissing, LayerCorrupt, NodeError
from barchan.kernel import directories, mounts, syscalls
from barchan.layers import prefetch, refs
from barchan.layers.attach import attach
from barchan.layers.cache import ImageCache
from barchan.layers.content import DATA, IMAGE, Content
from barchan.layers.store import Layer, LayerStore

_DAMAGED = (errno.EINVAL, errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EOPNOTSUPP)
_HEX = re.compile(r"[0-9a-f]{64}")


class LayerMounts:
    """Mounts of the layers of one host. Several processes may use one directory at once."""

    def __init__(self, root: Path, store: LayerStore, reduced: bool = False, cache: Path | None = None) -> None:
        """`cache`: a directory of this node for images of a shared store; None is the one beside `root`."""
        self.root = root
        self._store = store
        self._reduced = reduced
        self._cache = ImageCache(cache or root.parent / "cache/images") if store.shared else None

    def prepare(self) -> None:
        """Make the mount directory private. Idempotent; layers that are mounted already stay so."""
        directories.private(self.root)
        with self._locked():
            mounts.make_private(self.root)

    def acquire(self, layer: Layer) -> int:
        """A detached clone of the layer's mount; the caller closes it. The first use mounts the layer.

        `LayerCorrupt` when its content is not what its digest says; nothing stays mounted then.
        """
        target = self.root / refs.hex_of(layer.digest)
        fd = self.clone(layer)
        if fd is not None:
            return fd
        with self._locked():
            if (fd := self._clone(target)) is None:
                self._mount(layer, self._store.check(layer), target)
                fd = self._clone(target)
        if fd is None:
            raise NodeError(f"layer {layer.digest} was unmounted by someone else", phase="mount")
        return fd

    def clone(self, layer: Layer) -> int | None:
        """As `acquire`, but None if it is not mounted yet. Does not block."""
        return self._clone(f"{self.root}/{refs.hex_of(layer.digest)}")

    def _clone(self, target: Path | str) -> int | None:
        """None when nothing is mounted there: asked of the clone itself, not of a table that may change."""
        try:
            fd = syscalls.open_tree(target, clone=True)
        except FileNotFoundError:
            return None
        if syscalls.filesystem_magic(fd) == syscalls.MAGIC_EROFS:
            return fd
        os.close(fd)
        return None

    def _mount(self, layer: Layer, content: Content, target: Path) -> None:
        target.mkdir(mode=0o700, exist_ok=True)
        try:
            data = layer.path / DATA if content.data else None
            image = self._cache.image(layer, content) if self._cache and data else layer.path / IMAGE
            fd = attach(image, data, reduced=self._reduced)
            try:
                syscalls.move_mount(fd, target)
                prefetch.begin(self._store, layer.digest, target)
            finally:
                os.close(fd)
        except LayerCorrupt:
            target.rmdir()
            raise
        except OSError as error:
            target.rmdir()
            raise _typed(layer, error) from error

    def mounted(self) -> frozenset[str]:
        """Digests of the layers that are mounted."""
        prefix = os.path.realpath(self.root) + "/"
        names = (m.path.removeprefix(prefix) for m in mounts.current() if m.path.startswith(prefix))
        return frozenset(f"sha256:{name}" for name in names if _HEX.fullmatch(name))

    def close(self, digests: Collection[str]) -> None:
        """Unmount layers. One that sandboxes still use gets a second superblock if it is mounted again."""
        with self._locked():
            for digest in digests:
                self._unmount(self.root / refs.hex_of(digest))

    def _unmount(self, target: Path) -> None:
        while mounts.top(target):
            syscalls.unmount(target)
        target.rmdir()

    def unmount_all(self) -> None:
        """Unmount the layers and the directory itself. Idempotent."""
        if not self.root.is_dir():
            return
        self.close(self.mounted())
        while mounts.top(self.root):
            syscalls.unmount(self.root)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _typed(layer: Layer, error: OSError) -> NodeError:
    if error.errno == errno.ENODEV:
        return FeatureMissing(f"no EROFS in this kernel: {error}", hint="load the module erofs", phase="mount")
    if error.errno in _DAMAGED:
        return LayerCorrupt(
            f"layer {layer.digest} does not mount: {error}",
            hint="remove it with `barchan env rm` and import it again",
            phase="mount",
        )
    return NodeError(f"layer {layer.digest} does not mount: {error}", phase="mount")
