"""The Backend boundary: what a node agent needs from a way of running sandboxes.

A sandbox is created whole or not at all, lives on when the node agent dies, is adopted by the next agent, and is
destroyed by its id alone, however far its creation came.

    create(launch) ─▶ Running ─▶ connect(id) … ─▶ destroy(id)
                         ▲
    adopt(id, running) ──┘   after a restart of the agent

Implementations do not know each other. Powers beyond these verbs (snapshot, pause, TTY) are protocols of their own,
announced in `Abilities`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from barchan.environments import EnvironmentRef, Told, untold
from barchan.locks import EnvironmentLock
from barchan.networks import NetworkInfo
from barchan.packing import PackedLayer, PackOrder
from barchan.pools import PoolInfo
from barchan.spec import BackendName, SandboxSpec
from barchan.wire.messages import EnvironmentInfo


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can do on this host, found by trying."""

    backend: BackendName
    kernel: str = "full"
    stats: bool = False
    """It is `Metered`."""
    pack: bool = False
    """It is `Packable`."""
    notes: tuple[str, ...] = ()
    network: NetworkInfo = NetworkInfo()


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to make one sandbox."""

    id: str
    spec: SandboxSpec


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """How to find a sandbox again: kept in the registry."""

    pid: int
    """Of its first process, on the host."""
    pid_start: int
    """Start time of that process in clock ticks since boot, so that a recycled pid is recognised."""
    place: str = ""
    """Name under which the backend keeps what belongs to it, if that is not its id."""
    handles: bytes = b""
    """Whatever else the backend wants to be told when it adopts it."""
    open_network: bool = False


class Pack(msgspec.Struct, frozen=True, kw_only=True):
    """A request to make a layer of what a sandbox has changed."""

    id: str
    """Of the sandbox."""
    spec: SandboxSpec
    """Of the sandbox, settled."""
    key: str
    """Of the request: `packed` finds by it what the request made."""
    order: PackOrder


class Usage(NamedTuple):
    """Counters since the sandbox began; they only rise."""

    oom_kills: int
    pids_hits: int


class Used(NamedTuple):
    """Fields of `SandboxStats`, as measured now."""

    memory: int
    memory_peak: int | None
    cpu_user: float
    cpu_system: float
    pids: int
    processes: int
    disk: int
    oom_kills: int
    pids_hits: int


class Space(NamedTuple):
    """Room for writable trees, bytes."""

    size: int
    free: int


class Backend(Protocol):
    """Errors: `CreateFailed` with the phase, `EnvironmentNotFound`, `LayerCorrupt`, `NodeStorageFull`, `FeatureMissing`."""

    abilities: Abilities

    async def environments(self) -> tuple[EnvironmentInfo, ...]:
        """What can be named in a spec on this host."""

    async def settle(self, spec: SandboxSpec, told: Told = untold) -> SandboxSpec:
        """The same with all that its environment decides: the versions of names, and what a request left to the image.

        Returns when every image is here; `told` hears of those that must be fetched first.
        Refuses early what can be seen early: an unknown environment, a verb this backend lacks. What is settled stays so.
        """

    def take(self, launch: Launch) -> Running | None:
        """One that was made ahead and is ready; None if there is none: `create` makes one. Errors as of `settle`."""

    async def create(self, launch: Launch) -> Running:
        """Make it. On any error nothing is left behind."""

    async def adopt(self, id: str, running: Running) -> bool:
        """Whether it still runs and is the same one; if so, it is watched from here on."""

    async def connect(self, id: str, factory: Callable[[], asyncio.BufferedProtocol]) -> asyncio.Transport:
        """Dial its guest. May be called again at any time; the guest drops the older connection."""

    def watch(self, id: str, gone: Callable[[str], None]) -> None:
        """Call `gone(reason)` once, from the event loop, when its first process ends without `destroy`."""

    def usage(self, id: str) -> Usage: ...

    def space(self) -> Space: ...

    def disk_full(self, id: str) -> bool:
        """Whether another write of 1 MiB would exceed its disk limit."""

    async def destroy(self, id: str) -> None:
        """End and remove everything of it. Idempotent; safe after a half-made or unknown sandbox. Takes a place, too.

        It returns when no process of it is left; files and groups may go a moment later.
        """

    async def leftovers(self) -> frozenset[str]:
        """Ids of which anything exists on this host, and places that belong to none."""

    async def tidy(self) -> None:
        """Give back what nothing has needed for a while. Called now and then; sandboxes are not its business."""

    def pool(self) -> PoolInfo:
        """What it makes ahead, and what came of that."""

    async def close(self) -> None:
        """Let go of everything; sandboxes go on running."""


@runtime_checkable
class Metered(Protocol):
    """Of a backend that can say what each sandbox uses."""

    async def measure(self, id: str) -> Used:
        """Raises `SandboxUnavailable` when it ends meanwhile."""


@runtime_checkable
class Layered(Protocol):
    """Of a backend whose environments are layers."""

    async def lock(self, environment: EnvironmentRef) -> EnvironmentLock:
        """What its names mean now. Errors as of `settle`."""

    async def pull(self, image: str, told: Told = untold, *, again: bool = False) -> EnvironmentInfo:
        """Fetch an image from its registry; `again`: also if one is here that had its tag.

        Raises `ImageNotFound`, `ImageDenied`, `RegistryUnavailable`, `InvalidRequest`, `NodeStorageFull`, `CreateFailed`.
        """


@runtime_checkable
class Packable(Protocol):
    """Of a backend that can make a layer of what a sandbox has changed, while it runs."""

    async def pack(self, request: Pack) -> PackedLayer:
        """As of one moment during the call. What comes of it can be named in a spec at once. On any error, and when it is
        cancelled, nothing is left behind.

        Raises `InvalidRequest` naming a file that no layer may hold or the field that asks too much, `SandboxUnavailable` when it
        has ended, `EnvironmentNotFound` when a layer that it was made of is gone, `NodeStorageFull`, `CreateFailed`, `LayerCorrupt`.
        """

    async def packed(self, request: Pack) -> PackedLayer | None:
        """What the same request made before, also under another backend object and when the sandbox has ended."""


@runtime_checkable
class Populated(Protocol):
    """Of a backend whose sandboxes are processes of the host."""

    def pids(self, id: str) -> tuple[int, ...]:
        """Host ids of a sandbox's processes. `OSError` when it is gone. From any thread."""

    def throttled(self, id: str) -> float:
        """Seconds that its programs were kept from running by its limit of CPU time; only rises. 0 when it is gone."""

    def runnable(self, id: str) -> bool:
        """Whether its first process runs or waits for a processor; not when it sleeps, is stopped or frozen."""
