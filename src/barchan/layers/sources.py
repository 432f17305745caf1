"""From what people have (a directory, a tar) to a layer in the store."""

from __future__ import annotations

import errno
import tarfile
from pathlib import Path

from barchan.errors import InvalidRequest, NodeStorageFull
from barchan.kernel import directories
from barchan.layers import erofs, untar
from barchan.layers.store import Layer, LayerStore
from barchan.spec import check_name


def import_layer(
    store: LayerStore, name: str, source: Path, *, epoch: int | None = None, kind: str = "import"
) -> Layer:
    """Make a layer of a directory or a tar and give it the next version of `name`.

    The same content again is the same layer: no copy, no new version. `epoch` (Unix seconds) replaces later file times.
    Raises `InvalidRequest` naming the file at fault, `NodeStorageFull`; nothing half-made stays behind.
    """
    check_name(name, "name")
    try:
        with store.temporary() as work:
            image = work / "image"
            erofs.build(_tree(source, work), image, epoch=epoch)
            return store.add(image, name, source=str(source), kind=kind)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NodeStorageFull(f"no room to import {source}", hint="free disk space", phase="import") from error
        raise InvalidRequest(f"{source} cannot be imported: {error}", field="source", phase="import") from error


def _tree(source: Path, work: Path) -> Path:
    if source.is_dir():
        return source
    if not source.is_file():
        raise InvalidRequest(f"{source}: no such directory or tar", field="source")
    if not tarfile.is_tarfile(source):
        raise InvalidRequest(f"{source} is neither a directory nor a tar (plain, gzip, bzip2, xz)", field="source")
    tree = work / "tree"
    directories.make(tree, 0o755)
    untar.unpack(source, tree)
    return tree
