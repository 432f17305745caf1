"""A process that packs one sandbox after another: `python -m barchan.layers.pack_worker`, started by the node agent (`backends/packs.py`).

Standard input: a `PackJob` a line; its end is the end of the process and of all that it started. Standard output: a `PackNews` a line,
in their order. Of its own, because to pack is much computing, and because it can be ended at any moment. It goes on living, because
Python takes longer to start than a small layer to make.
"""

from __future__ import annotations

import errno
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from barchan.config import decode_config
from barchan.errors import BarchanError, EnvironmentNotFound, ErrorBody, InternalError, NodeStorageFull
from barchan.images import NO_CONFIG, ImageConfig
from barchan.layers.catalog import Provenance
from barchan.layers.lower import DIRECTORY, Lower
from barchan.layers.mount import LayerMounts
from barchan.layers.pack import Whole, described, pack
from barchan.layers.scrub import policy_of
from barchan.layers.store import LayerStore
from barchan.packing import PackedLayer, PackOrder

_FULL = (errno.ENOSPC, errno.EDQUOT)


class PackJob(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that stand still, and what to make of them."""

    store: Path
    mounts: Path
    """Of the layers of this host (`LayerMounts`)."""
    reduced: bool = False
    upper: Path
    stage: Path
    """Both of `Scratch.frozen`."""
    sandbox: str
    layers: tuple[str, ...]
    """Digests of what the sandbox was made of, top first."""
    environment: tuple[str, ...]
    """The names of that, from the bottom."""
    config: ImageConfig = NO_CONFIG
    """Of the image, when it is packed whole."""
    key: str
    order: PackOrder


class PackNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    packed: PackedLayer | None = None
    error: ErrorBody | None = None


def main() -> int:
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        news = _outcome(decode_config(jobs.get(), PackJob))
        sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
        sys.stdout.buffer.flush()


def _read(jobs: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        jobs.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # with a mkfs.erofs that is under way


def _outcome(job: PackJob) -> PackNews:
    try:
        return PackNews(packed=_pack(job))
    except BarchanError as error:
        return PackNews(error=error.body())
    except OSError as error:
        if error.errno in _FULL:
            full = NodeStorageFull(f"no room for the layer: {error}", hint="free disk space", phase="pack")
            return PackNews(error=full.body())
        return PackNews(error=_internal(error).body())
    except Exception as error:  # noqa: BLE001 - whoever waits is told, and the next job is another one's
        return PackNews(error=_internal(error).body())


def _internal(error: Exception) -> InternalError:
    return InternalError(f"{type(error).__name__}: {error}", phase="pack")


def _pack(job: PackJob) -> PackedLayer:
    store, order = LayerStore(job.store), job.order
    with ExitStack() as opened:
        report = pack(
            store,
            job.upper,
            order.name,
            below=Lower(lambda: _roots(job, store, opened)),
            stage=job.stage,
            policy=policy_of(order.scrub),
            source=job.sandbox,
            whole=Whole(job.layers[::-1], job.config) if order.whole else None,
            provenance=Provenance(operation=job.key, environment=job.environment),
        )
    return described(report, job.sandbox)


def _roots(job: PackJob, store: LayerStore, opened: ExitStack) -> Sequence[int]:
    """As the host has them mounted: what sandboxes have read of them is read from memory."""
    mounts, found = LayerMounts(job.mounts, store, job.reduced), list[int]()
    for digest in job.layers:
        with _clone(mounts, store, digest) as fd:
            found.append(os.open(".", DIRECTORY, dir_fd=fd))
        opened.callback(os.close, found[-1])
    return found


@contextmanager
def _clone(mounts: LayerMounts, store: LayerStore, digest: str) -> Iterator[int]:
    try:
        fd = mounts.acquire(store.resolve(digest))
    except EnvironmentNotFound as error:
        raise EnvironmentNotFound(
            f"layer {digest} of the sandbox was removed",
            hint="import what the sandbox was made of again",
            field="sandbox",
            phase="pack",
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
