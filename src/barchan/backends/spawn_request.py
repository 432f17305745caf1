"""Requests to the spawner and their bytes: native/spawn.h."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

from barchan.errors import CreateFailed

MAGIC = 0x314E5053
MAX_LAYERS, MAX_GROUPS, MAX_DATA, MAX_TARGET, MAX_TEXTS = 120, 8, 17, 1024, 64
_REQUEST = struct.Struct("<7Ii4I2Q64s")


class SpawnFlag(IntFlag):
    NETNS = 1
    SETUID = 2
    PTRACE = 4
    VOLATILE = 8
    REDUCED = 16
    ALL_CAPS = 32
    PARK = 64
    PLACE = 128
    REMOVE = 256
    HOSTS = 512


NO_FLAGS = SpawnFlag(0)
_PARK, _PLACE = int(SpawnFlag.PARK), int(SpawnFlag.PLACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnRequest:
    """One container. Descriptors stay the caller's: close them once `spawn` has returned."""

    uid_base: int
    """First host id of the sandbox's range; 0 inside."""
    uid_count: int
    hostname: str
    """At most 63 bytes."""
    listener: int
    """Listening socket that becomes the guest's descriptor 3."""
    writable: int
    """Detached mount with directories `u` and `w`, owned by canonical 0:0. It becomes idmapped: one use only."""
    cgroup: int
    """cgroup v2 directory, the guest's descriptor 4."""
    layers: tuple[int, ...]
    """Detached mounts, top first. They become idmapped: one use only."""
    groups: tuple[int, ...] = ()
    """`tasks` files of v1 groups, opened for writing by root. (`cgroup.procs` works and costs up to 30 ms: spawn.h.)"""
    data: tuple[tuple[int, str], ...] = ()
    """Detached mounts of directories and files, each with its absolute target inside."""
    netns: int | None = None
    """A prepared network namespace; without one the sandbox gets its own, loopback up."""
    flags: SpawnFlag = NO_FLAGS
    shm_bytes: int = 64 << 20
    """Size of /dev/shm, above 0."""
    oom_score_adj: int = 500
    """0 to 1000."""
    guest_uid: int = 0
    """Host id of the first process, outside the map; 0 takes the spawner's. Kernel limits that are counted per user
    (inotify instances, message queue bytes, pending signals) are shared by all sandboxes that have the same one."""
    parked: int = 0
    """`Parked.order`: use that child. Ids, cgroup, groups and network namespace are then what it was parked with."""

    def pack(self, id_: int) -> bytes:
        flags = self.flags | (SpawnFlag.NETNS if self.netns is not None else 0)
        groups = 0 if self.parked else len(self.groups)
        return _REQUEST.pack(
            MAGIC, id_, self.uid_base, self.uid_count, flags, len(self.layers), groups,
            self.oom_score_adj, self.guest_uid, self.parked, len(self.data), 0, self.shm_bytes, 0, self.hostname.encode(),
        ) + _texts(target for _, target in self.data)  # fmt: skip

    def descriptors(self) -> tuple[int, ...]:
        data = tuple(mount for mount, _ in self.data)
        if self.parked:
            return (self.listener, self.writable, *self.layers, *data)
        netns = () if self.netns is None else (self.netns,)
        return (self.listener, self.writable, self.cgroup, *netns, *self.groups, *self.layers, *data)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkRequest:
    """A child in all its namespaces and groups that waits for its files. Fields as in `SpawnRequest`."""

    uid_base: int
    uid_count: int
    cgroup: int
    groups: tuple[int, ...] = ()
    guest_uid: int = 0
    oom_score_adj: int = 500

    def pack(self, id_: int) -> bytes:
        return _REQUEST.pack(
            MAGIC, id_, self.uid_base, self.uid_count, SpawnFlag.PARK, 0, len(self.groups), self.oom_score_adj,
            self.guest_uid, 0, 0, 0, 1, 0, b"parked",
        )  # fmt: skip

    def descriptors(self) -> tuple[int, ...]:
        return (self.cgroup, *self.groups)


class Place(NamedTuple):
    """What belongs to one container on the host, found by its name: ids, groups, and a writable tree with its socket."""

    name: str
    limits: tuple[str, ...] = ()
    """`GroupTree.texts`; empty for one that exists and keeps its own."""
    disk: int = 1
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRequest:
    """A container, or with PARK among the flags a child that waits, whose place the spawner makes. Fields as in `SpawnRequest`."""

    place: Place
    hostname: str = "parked"
    layers: tuple[int, ...] = ()
    data: tuple[tuple[int, str], ...] = ()
    flags: SpawnFlag = NO_FLAGS
    shm_bytes: int = 64 << 20
    oom_score_adj: int = 500
    parked: int = 0

    def pack(self, id_: int) -> bytes:
        name, limits, disk = self.place
        return _REQUEST.pack(
            MAGIC, id_, 0, 0, int(self.flags) | _PLACE, len(self.layers), 0, self.oom_score_adj, 0, self.parked,
            len(self.data), 1 + len(limits), self.shm_bytes, disk, self.hostname.encode(),
        ) + _texts((*(target for _, target in self.data), name, *limits))  # fmt: skip

    def descriptors(self) -> tuple[int, ...]:
        return (*self.layers, *(mount for mount, _ in self.data))


@dataclass(frozen=True, slots=True)
class Removal:
    """Of places in which nothing runs any more."""

    names: tuple[str, ...]

    def pack(self, id_: int) -> bytes:
        head = _REQUEST.pack(MAGIC, id_, 0, 0, SpawnFlag.REMOVE, 0, 0, 0, 0, 0, 0, len(self.names), 0, 0, b"")
        return head + _texts(self.names)

    def descriptors(self) -> tuple[int, ...]:
        return ()


def _texts(texts: Iterable[str]) -> bytes:
    return b"".join(text.encode() + b"\0" for text in texts)


def check(request: SpawnRequest | PlacedRequest) -> None:
    least = 0 if int(request.flags) & _PARK else 1
    if not least <= len(request.layers) <= MAX_LAYERS:
        raise CreateFailed(f"{least} to {MAX_LAYERS} layers", phase="request")
    if isinstance(request, SpawnRequest) and len(request.groups) > MAX_GROUPS:
        raise CreateFailed(f"at most {MAX_GROUPS} groups", phase="request")
    if len(request.hostname.encode()) > 63 or "\0" in request.hostname or not request.hostname:
        raise CreateFailed("a host name has 1 to 63 bytes", phase="request")
    if not 0 <= request.oom_score_adj <= 1000 or request.shm_bytes <= 0:
        raise CreateFailed("oom_score_adj is 0 to 1000, shm_bytes above 0", phase="request")
    if len(request.data) > MAX_DATA or any(len(target.encode()) > MAX_TARGET for _, target in request.data):
        raise CreateFailed(f"at most {MAX_DATA} data mounts, targets of {MAX_TARGET} bytes", phase="request")
