"""Containers: the spawner's namespaces over shared EROFS layers and a btrfs subvolume, limited by cgroups.

Everything of a sandbox is found by its id alone (groups, subvolume, socket), so a half-made one is removed like a whole
one, also by the next agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from barchan.backends.base import Abilities, Launch, Running, Space, Usage
from barchan.backends.container_steps import Draft, Endpoint, Groups, HostIds, Layers, Writable, short_path
from barchan.backends.spawner import Spawner, SpawnFlag, SpawnRequest, install_guest
from barchan.backends.steps import Steps
from barchan.config import Layout, NodeConfig
from barchan.errors import SandboxUnavailable
from barchan.kernel import processes
from barchan.kernel.cgroups import GroupTree
from barchan.kernel.groups import Group
from barchan.kernel.idranges import IdRanges
from barchan.kernel.probe import HostReport
from barchan.kernel.scratch import Scratch
from barchan.layers.mount import LayerMounts
from barchan.layers.stack import compose
from barchan.layers.store import LayerStore
from barchan.spec import MIB, SandboxSpec
from barchan.wire.messages import EnvironmentInfo

logger = logging.getLogger(__name__)
T = TypeVar("T")
NATIVE = Path(__file__).resolve().parent.parent / "_native"
SHM_SHARE = 4
"""/dev/shm may hold this part of the memory limit; its pages count against it."""
HIGHEST_ID = 1 << 31
"""Some programs take larger ids for negative ones."""
OOM_SCORE = 300
"""Sandboxes go before the host's own processes."""
PROBE_BYTES = 1 * MIB


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
        self.abilities = Abilities(backend="container", kernel=report.kernel, notes=report.notes())
        self._config = config
        self._ranges = ranges
        self._tree = tree
        self._scratch = scratch
        self._store = store
        self._mounts = mounts
        self._sockets = config.layout.guest_sockets
        ids = HostIds(ranges, config.uid_first, config.uid_count)
        self._steps: Steps[Draft] = Steps(
            (ids, Groups(tree), Writable(scratch), Endpoint(self._sockets), Layers(mounts))
        )
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="container")
        self._spawner: Spawner | None = None
        self._spawner_context = contextlib.AsyncExitStack()
        self._spawner_lock = asyncio.Lock()
        self._guest = install_guest(NATIVE / "guest", config.layout.run)
        self._pidfds: dict[str, int] = {}
        self._groups: dict[str, Group] = {}

    @classmethod
    def open(cls, config: NodeConfig, report: HostReport, instance: str, scratch_size: int) -> ContainerBackend:
        """Prepare cgroups, scratch volume and mounts; takes up what a former agent left. Blocking."""
        layout: Layout = config.layout
        ranges = IdRanges(config.id_ranges, instance, (HIGHEST_ID - config.uid_first) // config.uid_count)
        ranges.prepare()
        tree = GroupTree(report.cgroups, f"barchan-{instance}")
        tree.prepare()
        scratch = Scratch.open(layout, scratch_size, report.quota)
        store = LayerStore(layout.layers)
        store.sweep()
        mounts = LayerMounts(layout.mounts, store, reduced=report.kernel == "reduced")
        mounts.prepare()
        return cls(config, report, ranges, tree, scratch, store, mounts)

    # --- making

    async def environments(self) -> tuple[EnvironmentInfo, ...]:
        entries = await self._in_thread(self._store.list)
        return tuple(
            EnvironmentInfo(name=e.name, version=e.version, digest=e.digest, size=e.size, created=e.created)
            for e in entries
        )

    async def check(self, spec: SandboxSpec) -> None:
        compose(spec.environment, self._store.resolve)

    async def create(self, launch: Launch) -> Running:
        draft = Draft(launch, compose(launch.spec.environment, self._store.resolve))
        try:
            await self._in_thread(lambda: self._steps.do(draft))
            spawned = await (await self._live_spawner()).spawn(self._request(draft))
        except BaseException:
            await asyncio.shield(self.destroy(launch.id))
            raise
        finally:
            self._threads.submit(draft.close)  # closing a detached mount may wait for an RCU grace period
        self._pidfds[launch.id] = spawned.pidfd
        return Running(pid=spawned.pid, pid_start=processes.start_time(spawned.pid))

    def _request(self, draft: Draft) -> SpawnRequest:
        spec = draft.launch.spec
        flags = SpawnFlag.VOLATILE
        flags |= SpawnFlag.SETUID if spec.setuid else SpawnFlag(0)
        flags |= SpawnFlag.PTRACE if spec.ptrace else SpawnFlag(0)
        flags |= SpawnFlag.REDUCED if self.abilities.kernel == "reduced" else SpawnFlag(0)
        assert draft.ids is not None and draft.group is not None and draft.listener is not None
        return SpawnRequest(
            uid_base=draft.ids.base,
            uid_count=draft.ids.size,
            guest_uid=draft.ids.guest,
            flags=flags,
            hostname=spec.hostname,
            shm_bytes=max(spec.limits.memory // SHM_SHARE, MIB),
            oom_score_adj=OOM_SCORE,
            listener=draft.listener.fileno(),
            writable=draft.tree_fd,
            cgroup=draft.group.dir_fd,
            groups=tuple(draft.group.tasks_fds),
            layers=tuple(draft.layer_fds),
        )

    async def _live_spawner(self) -> Spawner:
        """The running spawner; one that died is replaced."""
        async with self._spawner_lock:
            if self._spawner is None or not self._spawner.alive:
                if self._spawner is not None:
                    logger.warning("the spawner died; starting another")
                await self._spawner_context.aclose()
                start = Spawner.start(NATIVE / "spawner", self._guest, self._config.uid_first - 1)
                self._spawner = await self._spawner_context.enter_async_context(start)
            return self._spawner

    # --- living

    async def adopt(self, id: str, running: Running) -> bool:
        if not running.pid or processes.start_time(running.pid) != running.pid_start:
            return False
        try:
            pidfd = os.pidfd_open(running.pid)
        except ProcessLookupError:
            return False
        group = self._tree.open(id)
        if group is None or running.pid not in group.pids() or processes.start_time(running.pid) != running.pid_start:
            os.close(pidfd)
            return False
        self._groups[id] = group
        self._pidfds[id] = pidfd
        return True

    async def connect(self, id: str, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        with short_path(self._sockets / id) as name:
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
            counters = self._group(id).counters()
        except FileNotFoundError:
            return Usage(0, 0)
        return Usage(counters.oom_kills, counters.pids_max_hits)

    def space(self) -> Space:
        return Space(self._scratch.size, self._scratch.free())

    def disk_full(self, id: str) -> bool:
        """Tried by reserving, since the quota's figures trail by up to a commit."""
        probe = self._scratch.root / id / "probe"
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
            group = self._tree.open(id)
            if group is None:
                raise FileNotFoundError(id)
            self._groups[id] = group
        return group

    # --- ending

    async def destroy(self, id: str) -> None:
        pidfd = self._pidfds.pop(id, -1)
        if pidfd >= 0:
            await self._end(pidfd)
        group = self._groups.pop(id, None)
        if group is not None:
            group.close()
        await self._in_thread(lambda: self._steps.undo(id))

    async def _end(self, pidfd: int) -> None:
        """Kill the first process and wait for it: the kernel ends all others with it."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.remove_reader(pidfd)
        loop.add_reader(pidfd, gone.set)
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await asyncio.wait_for(gone.wait(), 30)
        except TimeoutError as error:
            raise SandboxUnavailable("its first process does not die", phase="stop") from error
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    async def leftovers(self) -> frozenset[str]:
        sockets = frozenset(path.name for path in self._sockets.iterdir())
        return await self._in_thread(lambda: self._ranges.list() | self._tree.list() | self._scratch.list() | sockets)

    async def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        loop = asyncio.get_running_loop()
        for pidfd in self._pidfds.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        await self._spawner_context.aclose()
        self._threads.shutdown()
        self._scratch.release()

    async def purge(self) -> None:
        """Take the installation down: everything that `open` made. Sandboxes must be gone."""
        await self.close()
        self._mounts.unmount_all()
        self._scratch.close()
        self._tree.close()
        self._ranges.close()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
