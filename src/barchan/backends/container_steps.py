"""What the making of a container goes through beside the spawner: its files, and the end of what is left of a place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from barchan.backends.container_data import DataMounts
from barchan.backends.container_net import TARGET, OpenNetwork
from barchan.backends.spawner import Spawned
from barchan.errors import BarchanError, CreateFailed
from barchan.kernel.cgroups import GroupTree
from barchan.kernel.idranges import IdRanges
from barchan.kernel.scratch import Scratch
from barchan.layers.mount import LayerMounts
from barchan.layers.store import Layer
from barchan.spec import Limits, SandboxSpec


class Order(NamedTuple):
    """What a container is made for."""

    spec: SandboxSpec
    layers: tuple[Layer, ...]
    shape: bytes
    """Equal for those that get equal containers."""


@dataclass(eq=False)
class Draft:
    """A container in the making, and the descriptors its making holds."""

    name: str
    """Its place: of its groups, tree and id range."""
    limits: Limits
    order: Order | None = None
    """None while it is only parked."""
    child: Spawned | None = None
    born: int = 0
    """`Running.pid_start`."""
    layer_fds: list[int] = field(default_factory=list)
    data: list[tuple[int, str]] = field(default_factory=list)
    """Mounts and their targets."""
    copies: list[Path] = field(default_factory=list)
    """Names of files among them, which they need until they are attached."""

    @property
    def pidfd(self) -> int:
        assert self.child is not None, "it is spawned"
        return self.child.pidfd

    def release(self) -> None:
        """Close what the spawner has by now. Idempotent."""
        for fd in (*self.layer_fds, *(fd for fd, _ in self.data)):
            os.close(fd)
        self.layer_fds, self.data = [], []

    def made(self) -> None:
        """It is whole, or will never be. Idempotent."""
        self.release()
        for path in self.copies:
            path.unlink(missing_ok=True)
        self.copies = []


class Sweep:
    """Removes every trace of a place by its name, also what still runs in it: for what the spawner left or never made."""

    def __init__(self, ranges: IdRanges, network: OpenNetwork, tree: GroupTree, scratch: Scratch) -> None:
        # the device first: its number is that of the groups' owner
        self._parts: tuple[Callable[[str], None], ...] = (network.remove, tree.destroy, scratch.drop)
        self._ranges = ranges

    def __call__(self, name: str) -> None:
        """Idempotent. Every part is tried; the first failure is raised at the end."""
        failures: list[Exception] = []
        for remove in self._parts:
            try:
                remove(name)
            except (BarchanError, OSError) as error:
                failures.append(error)
        if failures:
            raise failures[0]
        self._ranges.release(name)  # nothing may be left that belongs to them when another sandbox gets them


class Files:
    """Opens what the root file system of a container is made of."""

    def __init__(self, mounts: LayerMounts, data: DataMounts, network: OpenNetwork) -> None:
        self._mounts = mounts
        self._data = data
        self._network = network

    def at_once(self, draft: Draft) -> bool:
        """Without blocking: when every layer is mounted, and nothing else is asked. False leaves nothing open."""
        assert draft.order is not None
        if draft.order.spec.mounts:
            return False
        try:
            for layer in draft.order.layers:
                fd = self._mounts.clone(layer)
                if fd is None:
                    draft.release()
                    return False
                draft.layer_fds.append(fd)
            self._add_copies(draft, draft.order.spec)
        except OSError as error:
            raise _typed(error) from error
        return True

    def open(self, draft: Draft) -> None:
        """Blocking: the first use of a layer mounts it."""
        assert draft.order is not None
        try:
            for layer in draft.order.layers:
                draft.layer_fds.append(self._mounts.acquire(layer))
            draft.data += self._data.open(draft.order.spec)
            self._add_copies(draft, draft.order.spec)
        except OSError as error:
            raise _typed(error) from error

    def _add_copies(self, draft: Draft, spec: SandboxSpec) -> None:
        if spec.network.mode == "open":
            copy = self._network.copy()
            draft.data.append((copy.fd, TARGET))
            draft.copies.append(copy.path)


def _typed(error: OSError) -> CreateFailed:
    return CreateFailed(f"mount: {error.strerror or error}", phase="mount")


@contextlib.contextmanager
def short_path(directory: str, name: str) -> Iterator[str]:
    """A path below the 108 bytes that a socket address takes, whatever the data directory is called."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
