"""Packing containers beside the event loop: the changes are frozen in a thread and made a layer in a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from barchan.backends.base import Pack
from barchan.config import encode_config
from barchan.errors import BarchanError, CreateFailed, EnvironmentNotFound, InvalidRequest, NotSupported, from_body
from barchan.images import NO_CONFIG, ImageConfig
from barchan.kernel.scratch import Scratch
from barchan.layers.pack import found
from barchan.layers.pack_worker import PackJob, PackNews
from barchan.layers.refs import hex_of
from barchan.layers.stack import MOST, compose
from barchan.layers.store import Layer, LayerStore
from barchan.packing import PackedLayer

T = TypeVar("T")
DIGEST = 32
"""Bytes."""
IDLE_SECONDS = 60.0
"""How long a process that has nothing to do waits for more."""
_LONGEST_LINE = 1 << 20


class Worker:
    """A process that packs; one job at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.expiry: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls) -> Worker:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "barchan.layers.pack_worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
                start_new_session=True,
            )
        )

    @property
    def alive(self) -> bool:
        """Asked of the kernel: the event loop may not have heard yet that it died."""
        try:
            gone = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return gone is None and self._process.returncode is None

    async def ask(self, job: PackJob) -> PackNews:
        """Raises `CreateFailed` when it dies."""
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(encode_config(job) + b"\n")
            await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise CreateFailed("the process that packed was killed", hint="try again", phase="pack")
        return msgspec.json.decode(line, type=PackNews)

    async def end(self) -> None:
        """At once, with all that it started."""
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdin.close()
        await self._process.wait()


class Packs:
    """All methods belong to the event loop's thread. `at_once` are packed at the same time, others wait; of one sandbox always one."""

    def __init__(self, scratch: Scratch, store: LayerStore, mounts: Path, at_once: int, *, reduced: bool) -> None:
        self._scratch, self._store = scratch, store
        self._mounts, self._reduced = mounts, reduced
        self._room = asyncio.Semaphore(at_once)
        self._alone: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="pack")
        self._idle: list[Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def pack(self, request: Pack, place: str, stack: bytes, still: Callable[[], None]) -> PackedLayer:
        """`still` raises once the sandbox has ended: what is frozen then may be half of it.

        Raises what `base.Packable.pack` does. Giving it up ends the process and leaves nothing behind.
        """
        layers = _layers_of(request, stack)
        config = await self._in_thread(lambda: self._config(request, layers))
        alone = self._alone.setdefault(place, asyncio.Lock())
        async with alone, self._room:
            still()
            async with self._frozen(place, still) as (upper, stage):
                news = await self._done(self._job(request, layers, config, upper, stage))
        if news.error is not None:
            raise from_body(news.error)
        assert news.packed is not None, "one of the two"
        return news.packed

    async def packed(self, request: Pack) -> PackedLayer | None:
        return await self._in_thread(lambda: found(self._store, request.order.name, request.id, request.key))

    def _job(self, request: Pack, layers: tuple[str, ...], config: ImageConfig, upper: Path, stage: Path) -> PackJob:
        return PackJob(
            store=self._store.root,
            mounts=self._mounts,
            reduced=self._reduced,
            upper=upper,
            stage=stage,
            sandbox=request.id,
            layers=layers,
            environment=request.spec.environment.names(),
            config=config,
            key=request.key,
            order=request.order,
        )

    def _config(self, request: Pack, layers: tuple[str, ...]) -> ImageConfig:
        """What the images say that the sandbox was made of. `EnvironmentNotFound` when their names mean something else by now."""
        order, environment = request.order, request.spec.environment
        if not order.whole or order.config is not None:
            return order.config or NO_CONFIG
        whole = compose(environment, self._store.resolve)
        if tuple(layer.digest for layer in whole.layers) != layers:
            raise EnvironmentNotFound(
                f"what the sandbox was made of was removed: {', '.join(environment.names())} is another by now",
                hint="say what the image's config is",
                field="config",
            )
        return whole.config

    @contextlib.asynccontextmanager
    async def _frozen(self, place: str, still: Callable[[], None]) -> AsyncIterator[tuple[Path, Path]]:
        """Thawed also when whoever waits gives up while it is being frozen."""
        frozen = contextlib.ExitStack()
        freezing = asyncio.ensure_future(self._in_thread(lambda: frozen.enter_context(self._scratch.frozen(place))))
        try:
            try:
                taken = await asyncio.shield(freezing)
            except BarchanError:
                still()
                raise
            still()
            yield taken
        finally:
            await asyncio.shield(self._spawn(self._thaw(freezing, frozen)))

    async def _thaw(self, freezing: asyncio.Future[tuple[Path, Path]], frozen: contextlib.ExitStack) -> None:
        await asyncio.wait([freezing])
        await self._in_thread(frozen.close)
        if self._scratch.scarce():  # with what the sandbox has removed meanwhile
            self._spawn(self._in_thread(self._scratch.reclaim))

    async def _done(self, job: PackJob) -> PackNews:
        while self._idle:
            worker = self._idle.pop()
            if worker.expiry is not None:
                worker.expiry.cancel()
            if worker.alive:
                with contextlib.suppress(CreateFailed):  # it died while it waited, and has done nothing
                    return await self._asked(worker, job)
        await self._in_thread(self._store.sweep)  # after processes that an agent which was killed took along
        return await self._asked(await Worker.start(), job)

    async def _asked(self, worker: Worker, job: PackJob) -> PackNews:
        try:
            news = await worker.ask(job)
        except BaseException:
            await asyncio.shield(self._spawn(self._end(worker)))
            raise
        worker.expiry = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._expire, worker)
        self._idle.append(worker)
        return news

    def _expire(self, worker: Worker) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
            self._spawn(worker.end())

    async def _end(self, worker: Worker) -> None:
        """Of one that may have something half-made."""
        await worker.end()
        await self._in_thread(self._store.sweep)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self) -> None:
        """Nobody packs any more."""
        for worker in self._idle:
            if worker.expiry is not None:
                worker.expiry.cancel()
            self._spawn(worker.end())
        self._idle.clear()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown()


def stack_of(layers: Iterable[Layer]) -> bytes:
    """Their digests, `DIGEST` bytes each: their names may mean something else one day."""
    return b"".join(bytes.fromhex(hex_of(layer.digest)) for layer in layers)


def digests_of(stack: bytes) -> tuple[str, ...]:
    return tuple(f"sha256:{stack[at : at + DIGEST].hex()}" for at in range(0, len(stack), DIGEST))


def _layers_of(request: Pack, stack: bytes) -> tuple[str, ...]:
    """Top first."""
    layers = digests_of(stack)
    if not layers:
        raise NotSupported("the sandbox was made by an older barchan, which did not note its layers", field="sandbox")
    if request.order.whole and len(layers) >= MOST:
        hint = "pack the changes alone, and use them as a workspace or toolkit of something smaller"
        raise InvalidRequest(f"whole: {len(layers) + 1} layers, at most {MOST}", field="whole", hint=hint)
    return layers
