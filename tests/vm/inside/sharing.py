"""Two layers that hold an equal file are mounted; read in one, is it in memory for the other? The store is named as argument."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from barchan.kernel import sharing
from barchan.layers import access
from barchan.layers.access import LayerAccess
from barchan.layers.mount import LayerMounts
from barchan.layers.store import LayerStore


def main() -> None:
    store = LayerStore(Path(sys.argv[1]))
    mounts = LayerMounts(Path(sys.argv[1]).parent / "mnt", store, reduced=not sys.argv[2:])
    mounts.prepare()
    layers = [store.resolve(name) for name in ("one", "two")]
    try:
        first, second = (mounts.acquire(layer) for layer in layers)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        same = read(first, "same")
        seen = access.profile(mounts, layers)
        own = [read(fd, "own").decode() for fd in (first, second)]
        equal = read(second, "same") == same
        for fd in (first, second):
            os.close(fd)
    finally:
        mounts.unmount_all()
    print(
        json.dumps({"known": bool(sharing.options()), "equal": equal, "own": own, "read": [told(one) for one in seen]})
    )


def read(root: int, name: str) -> bytes:
    return Path(f"/proc/self/fd/{root}/{name}").read_bytes()


def told(layer: LayerAccess) -> dict[str, int]:
    return {file.path.decode(): file.read for file in layer.read}


if __name__ == "__main__":
    main()
