"""Images of split layers of a shared store, kept on the node: names and attributes are read here, contents over there.

    <root>/<hex>    the image of the layer sha256:<hex>, 0400; its time says when it was last mounted

A file has its name only when its bytes are what the layer's record says, and on disk. The root is the node's own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from barchan.kernel import directories
from barchan.layers import content as contents
from barchan.layers import refs
from barchan.layers.catalog import sync
from barchan.layers.content import IMAGE, Content
from barchan.layers.store import Layer
from barchan.spec import GIB

MOST = 4 * GIB
"""Bytes; those that were not mounted for longest go first. What is mounted stays readable."""


class ImageCache:
    """Several processes may use one at once."""

    def __init__(self, root: Path, most: int = MOST) -> None:
        self._root, self._most = root, most

    def image(self, layer: Layer, content: Content) -> Path:
        """Where the layer's image is now. `LayerCorrupt` when the store's is not what it should be, `OSError`."""
        path = self._root / refs.hex_of(layer.digest)
        try:
            if path.stat().st_size == content.image.size:
                os.utime(path)
                return path
        except FileNotFoundError:
            directories.private(self._root)
        self._fetch(layer, content, path)
        self._bound(path)
        return path

    def _fetch(self, layer: Layer, content: Content, path: Path) -> None:
        fd, name = tempfile.mkstemp(prefix=".", dir=self._root)
        os.close(fd)
        part = Path(name)
        try:
            shutil.copyfile(layer.path / IMAGE, part)
            contents.check(part, content.image, layer.digest)
            part.chmod(0o400)
            sync(part)
            os.replace(part, path)
            sync(self._root)
        finally:
            part.unlink(missing_ok=True)

    def _bound(self, kept: Path) -> None:
        found = sorted((entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(self._root))
        total = sum(os.stat(path).st_size for _, path in found)
        for _, path in found:
            if total <= self._most:
                return
            if path != str(kept):
                total -= os.stat(path).st_size
                os.unlink(path)
