"""Containers: the spawner's namespaces over shared EROFS layers and a btrfs subvolume, limited by cgroups.

Everything of a sandbox is found by one name, its place (groups, subvolume with the guest's socket, id range), so a half-made one is removed like a
whole one, also by the next agent. The place is the sandbox's id, unless it was made ahead of its request (`pool`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from barchan.backends.base import Abilities, Launch, Pack, Running, Space, Usage, Used
from barchan.backends.container_data import check_sources
from barchan.backends.container_make import ContainerMaker
from barchan.backends.container_steps import Draft, Order, short_path
from barchan.backends.layer_care import LayerCare
from barchan.backends.packs import Packs, digests_of, stack_of
from barchan.backends.pool import Pool
from barchan.backends.pulls import Pulls
from barchan.config import Layout, NodeConfig
from barchan.environments import EnvironmentRef, Told, untold
from barchan.errors import EnvironmentNotFound, SandboxUnavailable
from barchan.images import settled
from barchan.kernel import processes
from barchan.kernel.cgroups import GroupTree
from barchan.kernel.groups import Group
from barchan.kernel.idranges import IdRanges
from barchan.kernel.probe import HostReport
from barchan.kernel.scratch import Scratch
from barchan.layers import pointers
from barchan.layers.build_cache import lock
from barchan.layers.catalog import described
from barchan.layers.mount import LayerMounts
from barchan.layers.pull import images_missing
from barchan.layers.resolved import ResolvedNames
from barchan.layers.stack import compose
from barchan.layers.store import Layer, LayerStore
from barchan.locks import EnvironmentLock
from barchan.net.addresses import Addressing
from barchan.networks import NetworkInfo
from barchan.packing import PackedLayer
from barchan.pools import PoolInfo
from barchan.spec import MIB, SandboxSpec
from barchan.wire.messages import EnvironmentInfo

SOCKET = "s"
"""In a place's tree: native/places.c."""
NATIVE = Path(__file__).resolve().parent.parent / "_native"
HIGHEST_ID = 1 << 31
"""Some programs take larger ids for negative ones."""
PROBE_BYTES = 1 * MIB
POOLED_BYTES = 1 * MIB
"""What one that waits costs, on hosts where it costs most."""
_ENCODER = msgspec.msgpack.Encoder()
SETTLED = 64
SLOTS_SHARE = 8
"""Of the ranges of host ids one part in so many is for what is made ahead."""
_OF_COMMANDS: dict[str, Any] = {
    "environment": EnvironmentRef(base=""), "labels": {}, "env": {}, "secrets": {}, "user": "root", "workdir": "/", "idle_timeout": 1.0, "lifetime": 1.0,
}  # fmt: skip
"""Fields of a spec that do not change the container, its layers aside."""


class ContainerBackend:
    """See `base.Backend`. Use `open`."""

    def __init__(
        self,
        config: NodeConfig,
        report: HostReport,
        ranges: IdRanges,
        tree: GroupTree,
        scratch: Scratch,
        store: LayerStore,
        mounts: LayerMounts,
    ) -> None:
        self.abilities = Abilities(
            backend="container", kernel=report.kernel, notes=report.notes(), stats=True, pack=True
        )
        self._config = config
        self._report = report
        self._ranges = ranges
        self._tree = tree
        self._scratch = scratch
        self._store = store
        self._resolve = ResolvedNames(store)
        self._pulls = Pulls(config.layout.layers, config.registry, config.pulls, config.layer_format)
        self._care = LayerCare(config, store, mounts, self._pulls)
        self._settled: dict[int, tuple[SandboxSpec, tuple[Layer, ...]]] = {}
        """Layers of what was settled and comes to be made, by the identity of the spec."""
        self._mounts = mounts
        reduced = report.kernel == "reduced"
        self._packs = Packs(scratch, store, mounts.root, config.packs, reduced=reduced)
        self._maker = ContainerMaker(
            config, ranges, tree, scratch, mounts, native=NATIVE, reduced=reduced, tell=self._network_changed
        )
        self.network = self._maker.network
        self._pool = Pool(self._maker, config.pool_most, self._pool_room)
        self._pool_bound = (0.0, 0)
        self._places: dict[str, str] = {}
        """Of sandboxes whose place is not named by their id."""
        self._pidfds: dict[str, int] = {}
        self._groups: dict[str, Group] = {}
        self._stacks: dict[str, bytes] = {}
        """Of which layers sandboxes are made (`packs.stack_of`)."""

    @classmethod
    def open(cls, config: NodeConfig, report: HostReport, instance: str, scratch_size: int) -> ContainerBackend:
        """Prepare cgroups, scratch volume and mounts; takes up what a former agent left. Blocking."""
        layout: Layout = config.layout
        slots = min(
            (HIGHEST_ID - config.uid_first) // config.uid_count, Addressing(instance, config.network.prefix).slots
        )
        ranges = IdRanges(config.id_ranges, instance, slots)
        ranges.prepare()
        without = frozenset(() if config.memory_group else ("memory",))
        tree = GroupTree(report.cgroups, f"barchan-{instance}", without)
        tree.prepare()
        scratch = Scratch.open(layout, scratch_size, report.quota)
        scratch.thaw()
        store = LayerStore(layout.layers)
        store.sweep()
        mounts = LayerMounts(layout.mounts, store, reduced=report.kernel == "reduced")
        mounts.prepare()
        return cls(config, report, ranges, tree, scratch, store, mounts)

    def _network_changed(self, info: NetworkInfo) -> None:
        said = {"no open network": info.missing, "open networks may not get through": info.obstacles}
        notes = tuple(f"{what}: {why}" for what, why in said.items() if why)
        self.abilities = msgspec.structs.replace(self.abilities, network=info, notes=(*self._report.notes(), *notes))

    # --- making

    async def environments(self) -> tuple[EnvironmentInfo, ...]:
        return await self._maker.in_thread(self._environments)

    def _environments(self) -> tuple[EnvironmentInfo, ...]:
        entries, names = self._store.catalog.entries(), pointers.names_of(self._store.catalog)
        return tuple(described(entry, names.get(entry.reference, ())) for entry in entries)

    async def lock(self, environment: EnvironmentRef) -> EnvironmentLock:
        return await self._maker.in_thread(lambda: lock(self._store, environment))

    async def pull(self, image: str, told: Told = untold, *, again: bool = False) -> EnvironmentInfo:
        return await self._pulls.pull(image, told, again=again)

    async def settle(self, spec: SandboxSpec, told: Told = untold) -> SandboxSpec:
        check_sources(spec, self._config.data_mounts)
        if spec.network.mode == "open":
            await self.network.ready()
        try:
            whole = compose(spec.environment, self._resolve)
        except EnvironmentNotFound:
            if not await self._fetched(spec.environment, told):
                raise
            whole = compose(spec.environment, self._resolve)
        done = settled(spec, whole.environment, whole.config)
        while len(self._settled) >= SETTLED:
            self._settled.pop(next(iter(self._settled)))
        self._settled[id(done)] = (done, whole.layers)
        return done

    async def _fetched(self, environment: EnvironmentRef, told: Told) -> bool:
        """Whether it has images that were not here."""
        missing = await self._maker.in_thread(lambda: images_missing(self._store, environment))
        for image in missing:
            await self._pulls.pull(image, told)
        return bool(missing)

    def take(self, launch: Launch) -> Running | None:
        draft = self._pool.take_ready(self._order(launch.spec))
        return None if draft is None else self._handed_out(launch.id, draft)

    async def create(self, launch: Launch) -> Running:
        order = self._order(launch.spec)
        draft = self._pool.take(order)
        if draft is None or draft.order is None:
            draft = await self._maker.finish(draft, order, launch.id)
        return self._handed_out(launch.id, draft)

    def _handed_out(self, id: str, draft: Draft) -> Running:
        assert draft.child is not None and draft.order is not None
        self._maker.ahead.discard(draft.name)
        stack = self._stacks[id] = stack_of(draft.order.layers)
        self._pidfds[id] = draft.pidfd
        if draft.name != id:
            self._places[id] = draft.name
        return Running(pid=draft.child.pid, pid_start=draft.born, place=self._places.get(id, ""), handles=stack)

    def _order(self, spec: SandboxSpec) -> Order:
        known, layers = self._settled.pop(id(spec), (None, ()))
        if known is not spec:
            layers = compose(spec.environment, self._resolve).layers
        alike = msgspec.structs.replace(spec, **_OF_COMMANDS)
        files = self.network.resolv_conf if spec.network.mode == "open" else b""
        return Order(spec, layers, _ENCODER.encode((alike, [layer.digest for layer in layers], files)))

    def pool(self) -> PoolInfo:
        times = self._maker.times
        return msgspec.structs.replace(
            self._pool.info(),
            removing=len(self._maker.removals.pending),
            spawn_ms=times.total_ms,
            attach_ms=times.attach_ms,
        )

    def _pool_room(self) -> int:
        """Places for what is made ahead: few beside the id ranges and the memory of this host."""
        until, room = self._pool_bound
        if time.monotonic() > until:
            memory = processes.memory().available * self._config.pool_share
            room = min(self._config.pool_most, self._ranges.slots // SLOTS_SHARE, int(memory) // POOLED_BYTES)
            self._pool_bound = (time.monotonic() + 1.0, room)
        return room

    # --- living

    async def adopt(self, id: str, running: Running) -> bool:
        if running.place:
            self._places[id] = running.place
        if not running.pid or processes.start_time(running.pid) != running.pid_start:
            return False
        try:
            pidfd = os.pidfd_open(running.pid)
        except ProcessLookupError:
            return False
        group = self._tree.open(self._places.get(id, id))
        if group is None or running.pid not in group.pids() or processes.start_time(running.pid) != running.pid_start:
            os.close(pidfd)
            return False
        self._groups[id] = group
        self._pidfds[id] = pidfd
        self._stacks[id] = running.handles
        if running.open_network:
            await self.network.adopt(self._places.get(id, id), pidfd)
        return True

    async def connect(self, id: str, factory: Callable[[], asyncio.BufferedProtocol]) -> asyncio.Transport:
        with short_path(f"{self._scratch.root}/{self._places.get(id, id)}", SOCKET) as name:
            transport, _ = await asyncio.get_running_loop().create_unix_connection(factory, name)
        return transport

    def watch(self, id: str, gone: Callable[[str], None]) -> None:
        pidfd = self._pidfds[id]
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(pidfd)
            gone(self._why(id))

        loop.add_reader(pidfd, ended)

    def _why(self, id: str) -> str:
        if self.usage(id).oom_kills:
            return "its first process ended: out of memory (oom)"
        return "its first process ended"

    def usage(self, id: str) -> Usage:
        try:
            return Usage(*self._group(id).limit_hits())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
            return Usage(0, 0)

    async def measure(self, id: str) -> Used:
        try:
            group = self._group(id)
            return await self._maker.in_thread(lambda: self._measure(id, group))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
            raise SandboxUnavailable(f"sandbox {id} ended while it was measured") from error

    def pids(self, id: str) -> tuple[int, ...]:
        return self._tree.named(self._places.get(id, id)).pids()

    def throttled(self, id: str) -> float:
        return self._group(id).throttled() if id in self._pidfds else 0.0

    def runnable(self, id: str) -> bool:
        pidfd = self._pidfds.get(id, -1)
        return pidfd >= 0 and processes.state(processes.pid_of(pidfd)) == "R"

    def _measure(self, id: str, group: Group) -> Used:
        used, counters, disk = group.consumption(), group.counters(), self._scratch.usage(self._places.get(id, id))
        hits = {"oom_kills": counters.oom_kills, "pids_hits": counters.pids_max_hits}
        return Used(**msgspec.structs.asdict(used), **hits, disk=disk)

    def space(self) -> Space:
        return Space(*self._scratch.space())

    def disk_full(self, id: str) -> bool:
        """Tried by reserving, since the quota's figures trail by up to a commit."""
        probe = self._scratch.root / self._places.get(id, id) / "probe"
        try:
            fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, PROBE_BYTES)
            finally:
                os.close(fd)
                probe.unlink()
        except OSError as error:
            return error.errno in (errno.EDQUOT, errno.ENOSPC)
        return False

    def _group(self, id: str) -> Group:
        group = self._groups.get(id)
        if group is None:
            place = self._places.get(id, id)
            if place in self._maker.removals.pending:
                raise FileNotFoundError(errno.ENOENT, id)
            group = self._groups[id] = self._tree.named(place)
        return group

    # --- packing

    async def pack(self, request: Pack) -> PackedLayer:
        def still() -> None:
            if request.id not in self._pidfds:
                raise SandboxUnavailable(f"sandbox {request.id} has ended")

        still()
        place = self._places.get(request.id, request.id)
        return await self._packs.pack(request, place, self._stacks[request.id], still)

    async def packed(self, request: Pack) -> PackedLayer | None:
        return await self._packs.packed(request)

    # --- ending

    async def destroy(self, id: str) -> None:
        pidfd = self._pidfds.pop(id, -1)
        self._stacks.pop(id, None)
        if pidfd >= 0:
            await self._maker.end(pidfd, self._places.get(id, id))
        group = self._groups.pop(id, None)
        if group is not None:
            group.close()
        place = self._places.get(id, id)
        if pidfd >= 0:
            await self._maker.removals.add(place)
        else:
            await self._maker.remove(place)
        self._places.pop(id, None)

    async def leftovers(self) -> frozenset[str]:
        # What is removed while we look may be found, and not be pending any more when we have looked.
        going = self._maker.ahead | self._maker.removals.pending
        found = await self._maker.in_thread(lambda: self._ranges.list() | self._tree.list() | self._scratch.list())
        ids = {place: id for id, place in self._places.items()}
        return frozenset(
            ids.get(name, name) for name in found - going - self._maker.ahead - self._maker.removals.pending
        )

    async def tidy(self) -> None:
        held = frozenset(layer for stack in set(self._stacks.values()) for layer in digests_of(stack))
        loop = asyncio.get_running_loop()
        await self._maker.in_thread(lambda: self._care.tidy(loop, held))

    async def close(self) -> None:
        self._care.stop()
        await self._pulls.close()
        await self._packs.close()
        await self._pool.close()
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        loop = asyncio.get_running_loop()
        for pidfd in self._pidfds.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        await self._maker.close()
        self._scratch.release()

    async def purge(self) -> None:
        """Take the installation down: everything that `open` made. Sandboxes must be gone."""
        await self.close()
        self.network.purge()
        self._mounts.unmount_all()
        self._scratch.close()
        self._tree.close()
