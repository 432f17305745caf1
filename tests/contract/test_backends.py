"""The conformance suite of the Backend boundary: every implementation, the same expectations.

A backend is exercised as an agent does: create, dial, greet, run, adopt by a second object, watch, destroy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from barchan.backends.base import Backend, Launch, Metered, Pack, Packable, Running
from barchan.backends.container import HIGHEST_ID
from barchan.backends.fake import FakeBackend, FakeWorld
from barchan.errors import CreateFailed, EnvironmentNotFound, InvalidRequest, SandboxUnavailable
from barchan.layers.gc import GRACE, collect
from barchan.layers.sources import import_layer
from barchan.layers.store import LayerStore
from barchan.mounts import DataMount
from barchan.node.channel import GuestChannel
from barchan.node.main import open_backend
from barchan.packing import PackOrder
from barchan.spec import EnvironmentRef, Limits, SandboxSpec
from barchan.wire import guest
from barchan.wire.frames import Frame, FrameType, decode_data, encode_credit
from tests.contract.node_rig import config_for
from tests.e2e.conftest import make_tiny
from tests.server import disks

MIB = 1 << 20
SPEC = SandboxSpec(environment=EnvironmentRef(base="tiny"), limits=Limits(memory=64 * MIB, disk=32 * MIB, pids=64))


class Host:
    """Makes backends over one host, real or scripted, and knows how to hurt a sandbox on it."""

    def __init__(
        self,
        make: Callable[[], Backend],
        kill: Callable[[Backend, str, Running], None],
        exhaust: Callable[[], None] = lambda: None,
        store: LayerStore | None = None,
    ) -> None:
        self.make = make
        self.kill = kill
        self.exhaust = exhaust
        """Take away what the next sandbox needs."""
        self.store = store
        """Of its layers, if it has any."""


@contextlib.asynccontextmanager
async def fake_host(tmp_path: Path) -> AsyncIterator[Host]:
    world = FakeWorld()

    def kill(backend: Backend, id: str, running: Running) -> None:
        assert isinstance(backend, FakeBackend)
        backend.kill(id)

    yield Host(lambda: FakeBackend(world), kill)


def container_host(tmp_path: Path) -> contextlib.AbstractAsyncContextManager[Host]:
    return real_host(tmp_path, "auto")


def reduced_host(tmp_path: Path) -> contextlib.AbstractAsyncContextManager[Host]:
    """Containers as kernels below 6.13 get them: loop mounts, layers by path, ordinary quotas."""
    return real_host(tmp_path, "reduced")


@contextlib.asynccontextmanager
async def real_host(tmp_path: Path, kernel: Literal["auto", "reduced"]) -> AsyncIterator[Host]:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes namespaces, mounts and cgroups")
    if not disks():
        pytest.skip("no disk that is neither overlayfs nor tmpfs")
    data = disks()[0] / f"barchan-test-{os.getpid()}-contract"
    ranges, slots = tmp_path / "ids", 12
    config = msgspec.structs.replace(
        config_for(data),
        kernel=kernel,
        scratch_bytes=256 * MIB,
        id_ranges=ranges,
        uid_first=HIGHEST_ID - slots * 65536,
    )

    def exhaust() -> None:
        for slot in range(slots):
            (ranges / str(slot)).symlink_to("another/installation")

    config.layout.instance.write_text(secrets.token_hex(4))
    store = LayerStore(config.layout.layers)
    import_layer(store, "tiny", make_tiny(tmp_path / "tiny"))
    try:
        yield Host(
            lambda: open_backend(config), lambda _, id, running: os.kill(running.pid, signal.SIGKILL), exhaust, store
        )
    finally:
        last = open_backend(config)
        for id in await last.leftovers():
            await last.destroy(id)
        await last.purge()
        shutil.rmtree(data)


@pytest.fixture(params=[fake_host, container_host, reduced_host], ids=["fake", "container", "reduced"])
async def host(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Host]:
    async with request.param(tmp_path) as host:
        yield host


@pytest.fixture
async def backend(host: Host) -> AsyncIterator[Backend]:
    backend = host.make()
    yield backend
    await backend.close()


def launch(spec: SandboxSpec = SPEC) -> Launch:
    return Launch(id=f"n1-{secrets.token_hex(6)}", spec=spec)


async def dial(backend: Backend, id: str) -> tuple[GuestChannel, guest.Welcome]:
    transport = await backend.connect(id, lambda: GuestChannel(lambda channel, error: None))
    channel = transport.get_protocol()
    assert isinstance(channel, GuestChannel)
    welcome = await channel.greet()
    channel.deliver()
    return channel, welcome


async def run(channel: GuestChannel, op: int, *argv: bytes) -> tuple[guest.Done, bytes]:
    out = bytearray()
    done: asyncio.Future[guest.Done] = asyncio.get_running_loop().create_future()

    def sink(frame: Frame) -> None:
        if frame.type == FrameType.DATA:
            out.extend(decode_data(frame.payload)[1])
        elif frame.type == FrameType.DONE:
            done.set_result(guest.decode_done(frame.payload))

    channel.listen(op, sink)
    parts = guest.exec_parts(
        flags=0, timeout_ms=0, grace_ms=0, output_limit=MIB, nofile=0, cwd=b"/", argv=argv, env=[b"PATH=/bin"]
    )
    channel.send(guest.start(op, guest.OpKind.EXEC, b"", parts))
    for stream in (1, 2):
        channel.send(encode_credit(op, stream, MIB))
    async with asyncio.timeout(10):
        result = await done
    channel.release(op)
    return result, bytes(out)


async def test_a_sandbox_answers_and_runs(backend: Backend) -> None:
    wanted = launch()
    running = await backend.create(wanted)
    assert running.pid > 0 and running.pid_start > 0
    channel, welcome = await dial(backend, wanted.id)
    assert welcome.last == 0 and not welcome.ops
    done, out = await run(channel, 1, b"echo", b"hello", b"there")
    assert (done.outcome, done.code, out) == (guest.GuestOutcome.EXITED, 0, b"hello there\n")
    assert (await run(channel, 2, b"false"))[0].code == 1
    assert (await run(channel, 3, b"no-such-program"))[0].detail == b"exec"
    assert backend.usage(wanted.id) == (0, 0) and not backend.disk_full(wanted.id)
    await backend.destroy(wanted.id)
    assert wanted.id not in await backend.leftovers()


async def test_a_second_connection_replaces_the_first(backend: Backend) -> None:
    wanted = launch()
    await backend.create(wanted)
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    first = await backend.connect(wanted.id, lambda: GuestChannel(lambda channel, error: lost.set_result(None)))
    channel = first.get_protocol()
    assert isinstance(channel, GuestChannel)
    await channel.greet()
    channel.deliver()
    await run(channel, 5, b"true")
    second, welcome = await dial(backend, wanted.id)
    async with asyncio.timeout(5):
        await lost
    assert welcome.last == 5
    assert (await run(second, 6, b"true"))[0].code == 0
    await backend.destroy(wanted.id)


async def test_destroy_is_idempotent_and_takes_any_id(backend: Backend) -> None:
    await backend.destroy("n1-never-was-there")
    wanted = launch()
    await backend.create(wanted)
    await backend.destroy(wanted.id)
    await backend.destroy(wanted.id)
    with pytest.raises(OSError):
        await dial(backend, wanted.id)


async def test_the_next_backend_adopts(host: Host, backend: Backend) -> None:
    wanted = launch()
    running = await backend.create(wanted)
    channel, _ = await dial(backend, wanted.id)
    await run(channel, 7, b"true")
    await backend.close()
    successor = host.make()
    assert await successor.adopt(wanted.id, running)
    assert wanted.id in await successor.leftovers()
    again, welcome = await dial(successor, wanted.id)
    assert welcome.last == 7
    assert (await run(again, 8, b"echo", b"still"))[1] == b"still\n"
    await successor.destroy(wanted.id)
    await successor.close()


async def test_what_is_not_the_same_is_not_adopted(host: Host, backend: Backend) -> None:
    wanted = launch()
    running = await backend.create(wanted)
    other = Running(pid=running.pid, pid_start=running.pid_start + 1)
    assert not await backend.adopt(wanted.id, other), "a recycled pid"
    assert not await backend.adopt("n1-somebody-else", running), "another sandbox's process"
    assert not await backend.adopt(wanted.id, Running(pid=0, pid_start=0))
    await backend.destroy(wanted.id)


async def test_a_death_is_noticed_once(host: Host, backend: Backend) -> None:
    wanted = launch()
    running = await backend.create(wanted)
    reasons: list[str] = []
    noticed = asyncio.Event()

    def gone(reason: str) -> None:
        reasons.append(reason)
        noticed.set()

    backend.watch(wanted.id, gone)
    host.kill(backend, wanted.id, running)
    async with asyncio.timeout(5):
        await noticed.wait()
    await backend.destroy(wanted.id)
    assert len(reasons) == 1 and "first process" in reasons[0]


async def test_destroy_is_no_death(backend: Backend) -> None:
    wanted = launch()
    await backend.create(wanted)
    backend.watch(wanted.id, lambda reason: pytest.fail(reason))
    await backend.destroy(wanted.id)


async def test_unknown_environments_are_refused_before_anything_is_made(backend: Backend) -> None:
    spec = SandboxSpec(environment=EnvironmentRef(base="nowhere"))
    with pytest.raises(EnvironmentNotFound):
        await backend.settle(spec)
    with pytest.raises(EnvironmentNotFound):
        await backend.create(launch(spec=spec))
    assert not await backend.leftovers()


async def test_what_is_settled_says_everything_and_stays(backend: Backend) -> None:
    bare = SandboxSpec(environment=EnvironmentRef(base="tiny"))
    done = await backend.settle(bare)
    assert (done.environment.base, done.user, done.workdir) == ("tiny@1", "root", "/")
    assert await backend.settle(done) == done
    own = msgspec.structs.replace(bare, user="nobody", workdir="/tmp", env={"A": "b"})
    done = await backend.settle(own)
    assert (done.user, done.workdir, done.env) == ("nobody", "/tmp", {"A": "b"})


async def test_what_cannot_be_made_leaves_nothing(host: Host, backend: Backend) -> None:
    """The failure comes after the spec was accepted."""
    host.exhaust()
    spec = SandboxSpec(environment=EnvironmentRef(base="tiny"), labels={"fake.create": "fail:ids"})
    with pytest.raises(CreateFailed) as failed:
        await backend.create(launch(spec))
    assert failed.value.phase == "ids"
    assert not await backend.leftovers()


async def test_what_it_measures(backend: Backend) -> None:
    assert backend.abilities.stats == isinstance(backend, Metered) or not backend.abilities.stats
    if not backend.abilities.stats:
        return
    assert isinstance(backend, Metered)
    wanted = launch()
    await backend.create(wanted)
    used = await backend.measure(wanted.id)
    assert used.memory > 0 and used.memory_peak != 0 and used.processes >= 1 and used.pids >= used.processes
    assert used.cpu_user >= 0 and used.cpu_system >= 0 and used.disk >= 0 and (used.oom_kills, used.pids_hits) == (0, 0)
    await backend.destroy(wanted.id)
    with pytest.raises(SandboxUnavailable):
        await backend.measure(wanted.id)


def packing(wanted: Launch, name: str, **order: Any) -> Pack:
    return Pack(id=wanted.id, spec=wanted.spec, key=secrets.token_hex(4), order=PackOrder(name=name, **order))


async def test_what_it_packs_can_be_named_at_once(host: Host, backend: Backend) -> None:
    assert backend.abilities.pack and isinstance(backend, Packable)
    wanted = Launch(id=f"n1-{secrets.token_hex(6)}", spec=await backend.settle(SPEC))
    running = await backend.create(wanted)
    channel, _ = await dial(backend, wanted.id)
    await run(channel, 1, b"touch", b"/made")  # which the fake does not have
    changes, whole = packing(wanted, "changes"), packing(wanted, "whole", whole=True)
    assert await backend.packed(changes) is None
    first, second = await asyncio.gather(backend.pack(changes), backend.pack(whole))
    assert (first.reference, first.layers, second.layers) == ("changes@1", 1, 2)
    assert first.digest == first.layer and second.digest != second.layer and first.sandbox == wanted.id
    for environment in (EnvironmentRef(base="whole"), EnvironmentRef(base="tiny", toolkits=("changes",))):
        made = Launch(id=f"n1-{secrets.token_hex(6)}", spec=msgspec.structs.replace(SPEC, environment=environment))
        await backend.create(made)
        channel, _ = await dial(backend, made.id)
        assert (await run(channel, 1, b"echo", b"there"))[1] == b"there\n"
        await backend.destroy(made.id)
    await backend.close()
    successor = host.make()
    assert isinstance(successor, Packable) and await successor.adopt(wanted.id, running)
    assert await successor.packed(changes) == first and await successor.packed(whole) == second
    assert (await successor.pack(packing(wanted, "again"))).layers == 1, "it knows the layers from what it adopts"
    await successor.destroy(wanted.id)
    with pytest.raises(SandboxUnavailable):
        await successor.pack(packing(wanted, "late"))
    assert await successor.packed(changes) == first
    await successor.close()


async def test_what_a_sandbox_is_made_of_is_kept_for_packing(host: Host, backend: Backend) -> None:
    assert isinstance(backend, Packable)
    if host.store is None:
        return
    wanted = Launch(id=f"n1-{secrets.token_hex(6)}", spec=await backend.settle(SPEC))
    await backend.create(wanted)
    layer = host.store.resolve("tiny").digest
    host.store.remove("tiny")
    collect(host.store, now=time.time() - GRACE)
    await backend.tidy()
    assert layer in host.store.sizes()
    assert (await backend.pack(packing(wanted, "kept"))).layers == 1
    await backend.destroy(wanted.id)
    collect(host.store, now=time.time() - GRACE)
    await backend.tidy()
    assert layer not in host.store.sizes()


async def test_a_packing_that_is_given_up_leaves_nothing(host: Host, backend: Backend) -> None:
    assert isinstance(backend, Packable)
    spec = msgspec.structs.replace(SPEC, labels={"fake.pack": "hang"})
    wanted = Launch(id=f"n1-{secrets.token_hex(6)}", spec=await backend.settle(spec))
    await backend.create(wanted)
    task = asyncio.ensure_future(backend.pack(request := packing(wanted, "given-up")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await backend.packed(request) is None
    with pytest.raises(EnvironmentNotFound):
        await backend.settle(SandboxSpec(environment=EnvironmentRef(base="given-up")))
    await backend.destroy(wanted.id)
    assert not await backend.leftovers()


async def test_a_data_mount_that_is_not_there_is_refused(backend: Backend) -> None:
    spec = msgspec.structs.replace(SPEC, mounts=(DataMount(source="nowhere", target="/data"),))
    with pytest.raises(InvalidRequest) as refused:
        await backend.settle(spec)
    assert refused.value.field == "mounts.source"


async def test_tidying_takes_nothing_from_sandboxes(backend: Backend) -> None:
    wanted = launch()
    await backend.create(wanted)
    await backend.tidy()
    another = launch()
    await backend.create(another)
    for one in (wanted, another):
        transport = await backend.connect(one.id, asyncio.BufferedProtocol)
        transport.abort()
        await backend.destroy(one.id)


async def test_several_at_once(backend: Backend) -> None:
    wanted = [launch() for _ in range(8)]
    await asyncio.gather(*(backend.create(one) for one in wanted))
    for one in wanted:
        channel, _ = await dial(backend, one.id)
        assert (await run(channel, 1, b"echo", one.id.encode()))[1] == one.id.encode() + b"\n"
    assert {one.id for one in wanted} <= await backend.leftovers()
    await asyncio.gather(*(backend.destroy(one.id) for one in wanted))
    assert not {one.id for one in wanted} & await backend.leftovers()
