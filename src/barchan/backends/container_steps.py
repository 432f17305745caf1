"""The steps that make a container, each undone by the name of its place alone. `container` puts them in order."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from barchan.backends.spawner import Spawned
from barchan.kernel.cgroups import GroupTree
from barchan.kernel.groups import Group
from barchan.kernel.idranges import IdRanges
from barchan.kernel.scratch import Scratch
from barchan.layers.mount import LayerMounts
from barchan.layers.store import Layer
from barchan.spec import Limits, SandboxSpec


class Ids(NamedTuple):
    """Host ids of one sandbox: those it maps, and one of its own for its first process, outside the map.

    Kernel limits counted per user (inotify instances, pending signals) add up at that last one, so it is not shared.
    """

    base: int
    size: int

    @property
    def guest(self) -> int:
        return self.base + self.size


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
    """Its place: of its groups, tree, socket and id range."""
    limits: Limits
    order: Order | None = None
    """None while it is only parked."""
    child: Spawned | None = None
    born: int = 0
    """`Running.pid_start`."""
    ids: Ids | None = None
    group: Group | None = None
    tree_fd: int = -1
    listener: socket.socket | None = None
    layer_fds: list[int] = field(default_factory=list)
    data: list[tuple[int, str]] = field(default_factory=list)
    """Mounts and their targets."""

    @property
    def pidfd(self) -> int:
        assert self.child is not None, "it is spawned"
        return self.child.pidfd

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.release()

    def release(self) -> None:
        """Close what only its making needs. Closing a detached mount may wait for an RCU grace period."""
        if self.listener is not None:
            self.listener.close()
        for fd in (self.tree_fd, *self.layer_fds, *(fd for fd, _ in self.data)):
            if fd >= 0:
                os.close(fd)
        self.tree_fd, self.layer_fds, self.data = -1, [], []


class HostIds:
    name = "ids"

    def __init__(self, ranges: IdRanges, first: int, size: int) -> None:
        self._ranges = ranges
        self._first = first
        self._size = size

    def do(self, draft: Draft) -> None:
        slot = self._ranges.claim(draft.name)
        draft.ids = Ids(self._first + slot * self._size, self._size - 1)

    def undo(self, id: str) -> None:
        self._ranges.release(id)


class Groups:
    name = "cgroups"

    def __init__(self, tree: GroupTree) -> None:
        self._tree = tree

    def do(self, draft: Draft) -> None:
        assert draft.ids is not None
        draft.group = self._tree.make(draft.name, draft.limits, draft.ids.guest)

    def undo(self, id: str) -> None:
        self._tree.destroy(id)


class Writable:
    name = "disk"

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def do(self, draft: Draft) -> None:
        self._scratch.make(draft.name, draft.limits.disk)
        draft.tree_fd = self._scratch.open_mount(draft.name)

    def undo(self, id: str) -> None:
        self._scratch.drop(id)


class Endpoint:
    """The socket on which the guest listens: bound here, known by name on the host only."""

    name = "socket"

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory

    def do(self, draft: Draft) -> None:
        draft.listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(self._directory / draft.name) as name:
            listener.bind(name)
        listener.listen(8)

    def undo(self, id: str) -> None:
        (self._directory / id).unlink(missing_ok=True)


class Sizes:
    """Limits of one that was made before they were known."""

    name = "limits"

    def __init__(self, tree: GroupTree, scratch: Scratch) -> None:
        self._tree = tree
        self._scratch = scratch

    def do(self, draft: Draft) -> None:
        assert draft.order is not None
        limits = draft.order.spec.limits
        if limits == draft.limits:
            return
        self._tree.limit(draft.name, limits)
        self._scratch.limit(draft.name, limits.disk)
        draft.limits = limits

    def undo(self, id: str) -> None:
        """They go with the groups and the tree."""


class Layers:
    name = "mount"

    def __init__(self, mounts: LayerMounts) -> None:
        self._mounts = mounts

    def do(self, draft: Draft) -> None:
        assert draft.order is not None
        for layer in draft.order.layers:
            draft.layer_fds.append(self._mounts.acquire(layer))

    def undo(self, id: str) -> None:
        """Layers stay mounted for the next sandbox."""


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name of `path` below the 108 bytes that a socket address takes, whatever the data directory is called."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
