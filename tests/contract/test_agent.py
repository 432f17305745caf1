"""The node agent over the scripted backend: what it promises whatever happens around it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from barchan import errors
from barchan.backends.base import Usage
from barchan.backends.fake import FakeBackend, FakeWorld
from barchan.control.nodes import Nodes
from barchan.node import lease
from barchan.node.agent import Agent
from barchan.node.server import keep_linked
from barchan.spec import EnvironmentRef, Exec, ExecInfo, NodeName, SandboxInfo, SandboxSpec
from barchan.usage import SandboxStats
from barchan.wire import messages as m
from barchan.wire.frames import CHUNK, STDIN
from tests.contract.node_rig import Caller, agent_on, config_for


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


@pytest.fixture
async def agent(tmp_path: Path, world: FakeWorld) -> AsyncIterator[Agent]:
    async with agent_on(config_for(tmp_path / "data"), FakeBackend(world)) as agent:
        yield agent


@pytest.fixture
async def caller(agent: Agent) -> Caller:
    return Caller(agent)


def backend_of(agent: Agent) -> FakeBackend:
    backend = agent.backends["container"]
    assert isinstance(backend, FakeBackend)
    return backend


async def state_of(caller: Caller, id: str) -> SandboxInfo:
    return m.unpack(await caller.ask(m.GetSandbox(sandbox=id)), SandboxInfo)


async def until_state(caller: Caller, id: str, state: str) -> SandboxInfo:
    async with asyncio.timeout(5):
        while (info := await state_of(caller, id)).state != state:
            await asyncio.sleep(0)
    return info


async def test_create_run_stop(caller: Caller, world: FakeWorld) -> None:
    info = await caller.create(labels={"team": "a"})
    assert info.state == "ready" and info.id.startswith("n1-") and info.ready_ms > 0
    result, out = await caller.run(info.id, "echo", "hello")
    assert (result.outcome, result.exit_code, out) == ("exited", 0, b"hello\n")
    assert (await caller.run(info.id, "exit", "3"))[0].exit_code == 3
    assert (await caller.run(info.id, "nonsense"))[0].outcome == "not_found"
    await caller.ask(m.StopSandbox(sandbox=info.id))
    await caller.ask(m.StopSandbox(sandbox=info.id))
    assert (await state_of(caller, info.id)).state == "stopped"
    assert not world.guests
    with pytest.raises(errors.SandboxStopped):
        await caller.run(info.id, "true")


async def test_listing_by_labels(caller: Caller) -> None:
    a, b = await caller.create(labels={"k": "1"}), await caller.create(labels={"k": "2", "x": "y"})
    listed = m.unpack(await caller.ask(m.ListSandboxes(labels={"k": "2"})), tuple[SandboxInfo, ...])
    assert [info.id for info in listed] == [b.id]
    everything = m.unpack(await caller.ask(m.ListSandboxes()), tuple[SandboxInfo, ...])
    assert {info.id for info in everything} == {a.id, b.id}


async def test_a_key_makes_one_sandbox(caller: Caller, world: FakeWorld) -> None:
    one, two = await asyncio.gather(caller.create(key="k1"), caller.create(key="k1"))
    assert one.id == two.id and len(world.guests) == 1
    assert (await caller.create(key="k1")).id == one.id
    with pytest.raises(errors.Conflict):
        await caller.create(key="k1", user="other")


@pytest.mark.parametrize("phase", ["cgroups", "disk", "mount", "overlay"])
async def test_a_failed_create_names_its_phase_and_leaves_nothing(caller: Caller, world: FakeWorld, phase: str) -> None:
    with pytest.raises(errors.CreateFailed) as failed:
        await caller.create(key="k", labels={"fake.create": f"fail:{phase}"})
    assert failed.value.phase == phase
    assert not world.guests and not world.half_made
    with pytest.raises(errors.CreateFailed):
        await caller.create(key="k", labels={"fake.create": f"fail:{phase}"})


class Unreachable(FakeBackend):
    """Its guests die before they are dialled."""

    async def connect(self, id: str, factory: Callable[[], asyncio.BufferedProtocol]) -> asyncio.Transport:
        self.kill(id)
        return await super().connect(id, factory)


class HungUp(FakeBackend):
    """Its guests die while they are dialled, before anybody looks at the connection."""

    async def connect(self, id: str, factory: Callable[[], asyncio.BufferedProtocol]) -> asyncio.Transport:
        transport = await super().connect(id, factory)
        self.kill(id)
        while transport.get_protocol() is not None:
            await asyncio.sleep(0)
        return transport


class ShortLived(FakeBackend):
    """Its guests die between their greeting and the watch."""

    def watch(self, id: str, gone: Callable[[str], None]) -> None:
        super().watch(id, gone)
        self.kill(id)


@pytest.mark.parametrize("backend", [Unreachable, HungUp])
async def test_a_guest_that_dies_before_its_greeting_is_a_failed_create(
    tmp_path: Path, world: FakeWorld, backend: type[FakeBackend]
) -> None:
    async with agent_on(config_for(tmp_path / "data"), backend(world)) as agent, asyncio.timeout(10):
        for _ in range(2):
            with pytest.raises(errors.CreateFailed):
                await Caller(agent).create(key="young")
        assert not agent.sandboxes


async def test_a_guest_that_dies_right_after_its_greeting_is_missed_by_nobody(tmp_path: Path, world: FakeWorld) -> None:
    async with agent_on(config_for(tmp_path / "data"), ShortLived(world)) as agent:
        caller = Caller(agent)
        with contextlib.suppress(errors.CreateFailed):
            await caller.create(key="young")
        row = agent.registry.by_key("young")
        assert row is not None
        assert "first process ended" in (await until_state(caller, row.id, "failed")).reason
        assert not agent.sandboxes


async def test_stop_while_creating_has_one_outcome(caller: Caller, agent: Agent, world: FakeWorld) -> None:
    creating = asyncio.ensure_future(caller.create(labels={"fake.create": "hang"}))
    async with asyncio.timeout(5):
        while not world.half_made or not agent.registry.live():
            await asyncio.sleep(0)
    (id,) = world.half_made
    stopping = asyncio.ensure_future(caller.ask(m.StopSandbox(sandbox=id)))
    async with asyncio.timeout(5):
        while (await state_of(caller, id)).state != "stopping":
            await asyncio.sleep(0)
        await backend_of(agent).destroy(id)
        await stopping
    with pytest.raises(errors.BarchanError):
        await creating
    assert (await state_of(caller, id)).state == "stopped"
    assert not world.guests and not world.half_made


async def test_an_abandoned_create_leaves_no_sandbox(caller: Caller, agent: Agent, world: FakeWorld) -> None:
    request = m.CreateSandbox(spec=_spec({"fake.create": "hang"}), key="gone")
    call = caller.link.call(m.pack_call(request))
    async with asyncio.timeout(5):
        while not world.half_made or agent.registry.by_key("gone") is None:
            await asyncio.sleep(0)
        call.abandon()
        (id,) = world.half_made
        while (await state_of(caller, id)).state != "stopping":
            await asyncio.sleep(0)
        await backend_of(agent).destroy(id)
    await until_state(caller, id, "stopped")
    assert not world.guests


async def test_a_create_given_up_while_it_is_claimed_leaves_nothing(
    caller: Caller, agent: Agent, world: FakeWorld
) -> None:
    """The claim is on its way to the disk when the caller gives up: neither a sandbox nor its row may be left half-made."""
    calls = [
        caller.link.call(m.pack_call(m.CreateSandbox(spec=_spec({}), key=f"gone.{number}"))) for number in range(20)
    ]
    async with asyncio.timeout(5):
        while not agent.creation.claiming:
            await asyncio.sleep(0)
    for call in calls:
        call.abandon()
    for number in range(20):
        await caller.ask(m.AbandonCreate(key=f"gone.{number}"))
    assert not agent.registry.live() and not world.guests and not world.half_made


async def test_abandoning_what_never_was_is_fine(caller: Caller) -> None:
    await caller.ask(m.AbandonCreate(key="never"))


async def test_stats_are_what_the_backend_measured(caller: Caller, agent: Agent) -> None:
    info = await caller.create()
    used = agent.get(info.id).last_used
    found = m.unpack(await caller.ask(m.GetStats(sandbox=info.id)), SandboxStats)
    assert (found.id, found.since) == (info.id, info.created) and found.at >= found.since
    assert (found.memory, found.memory_peak, found.pids, found.disk) == (1 << 20, 2 << 20, 3, 4 << 20)
    assert agent.get(info.id).last_used == used, "looking is no use"
    await caller.ask(m.StopSandbox(sandbox=info.id))
    with pytest.raises(errors.SandboxStopped):
        await caller.ask(m.GetStats(sandbox=info.id))
    with pytest.raises(errors.SandboxNotFound):
        await caller.ask(m.GetStats(sandbox="n1-00000000"))


async def test_a_backend_that_does_not_measure_says_so(tmp_path: Path, world: FakeWorld) -> None:
    async with agent_on(config_for(tmp_path / "data"), FakeBackend(world, stats=False)) as agent:
        caller = Caller(agent)
        info = await caller.create()
        with pytest.raises(errors.NotSupported, match="measure"):
            await caller.ask(m.GetStats(sandbox=info.id))


async def test_ended_ones_are_listed_when_asked_for(caller: Caller) -> None:
    live, ended = await caller.create(), await caller.create()
    await caller.ask(m.StopSandbox(sandbox=ended.id))

    async def ids(**filters: object) -> list[str]:
        found = m.unpack(await caller.ask(m.ListSandboxes(**filters)), tuple[SandboxInfo, ...])  # type: ignore[arg-type]
        return [info.id for info in found]

    assert await ids() == [live.id]
    assert await ids(ended=True) == sorted([live.id, ended.id])
    assert await ids(states=("stopped",)) == [ended.id]
    assert await ids(ended=True, limit=1) == sorted([live.id, ended.id])[:1]
    assert await ids(node="elsewhere") == []


def _spec(labels: dict[str, str]) -> SandboxSpec:
    return SandboxSpec(environment=EnvironmentRef(base="tiny"), labels=labels)


async def test_a_dead_guest_is_told_to_all_who_wait(caller: Caller, agent: Agent) -> None:
    info = await caller.create()
    running = caller.start(info.id, "sleep", "1000")
    await running.started
    backend_of(agent).kill(info.id)
    with pytest.raises(errors.SandboxUnavailable, match="first process"):
        await running.result()
    ended = await until_state(caller, info.id, "failed")
    assert "first process" in ended.reason
    with pytest.raises(errors.SandboxUnavailable):
        await caller.run(info.id, "true")


async def test_a_guest_that_breaks_the_protocol_is_dropped(caller: Caller, agent: Agent) -> None:
    info = await caller.create(labels={"fake.guest": "rude"})
    with pytest.raises(errors.SandboxUnavailable):
        await caller.run(info.id, "true")
    assert "trusted" in (await until_state(caller, info.id, "failed")).reason


async def test_a_broken_link_is_dialled_again_without_a_gap(caller: Caller, world: FakeWorld) -> None:
    info = await caller.create()
    running = caller.start(info.id, "cat", stdin=True)
    await running.started
    async with asyncio.timeout(5):
        while not running.input_limit:
            await asyncio.sleep(0)
        running.call.send_data(STDIN, 0, b"before ")
        while running.stdout != b"before ":
            await asyncio.sleep(0)
        world.guests[info.id].hang_up()
        before = running.input_limit
        while running.input_limit == before and world.guests[info.id]._connection is None:
            await asyncio.sleep(0)
        running.call.send_data(STDIN, 7, b"after")
        while running.stdout != b"before after":
            await asyncio.sleep(0)
        running.call.send_eof(STDIN, 12)
        assert (await running.result()).stdout_bytes == 12


async def test_a_known_id_answers_and_never_runs_again(caller: Caller, world: FakeWorld) -> None:
    info = await caller.create()
    first = caller.start(info.id, "echo", "once", id="op")
    result = await first.result()
    asked = world.guests[info.id].last
    second = caller.start(info.id, "echo", "once", id="op")
    assert await second.result() == result and second.stdout == b"once\n"
    with pytest.raises(errors.Conflict):
        await caller.start(info.id, "echo", "twice", id="op").result()
    assert world.guests[info.id].last == asked, "the guest was asked once"


async def test_a_caller_may_leave_and_come_back(caller: Caller, agent: Agent) -> None:
    info = await caller.create()
    running = caller.start(info.id, "cat", id="op", stdin=True)
    await running.started
    caller.hang_up()
    second = Caller(agent)
    again = second.attach(info.id, "op")
    event = await again.started
    assert event.stdin_offset == 0
    again.call.send_data(STDIN, 0, b"x" * 10)
    again.call.send_eof(STDIN, 10)
    assert (await again.result()).stdout_bytes == 10 and again.stdout == b"x" * 10
    partial = second.attach(info.id, "op", offset=4)
    await partial.result()
    assert partial.stdout == b"x" * 6


async def test_a_flood_waits_for_a_slow_reader(caller: Caller, world: FakeWorld) -> None:
    """Without credit nothing flows: the guest keeps what nobody takes."""
    info = await caller.create()
    request = m.StartExec(sandbox=info.id, id="op", exec=Exec(argv=(b"flood", b"3000000")))
    seen: list[int] = []
    call = caller.link.call(m.pack_call(request), lambda frame: seen.append(len(frame.payload)))
    async with asyncio.timeout(5):
        while not world.guests[info.id].ops:
            await asyncio.sleep(0)
        call.credit(1, 1000)
        call.credit(2, 1000)
        while sum(seen) < 1000:
            await asyncio.sleep(0)
    (op,) = world.guests[info.id].ops.values()
    assert op.streams[1].sent == 1000
    call.abandon()
    again = caller.attach(info.id, "op")
    assert (await again.result()).stdout_bytes == 3_000_000
    assert len(again.stdout) == 3_000_000


async def test_input_beyond_its_credit_ends_the_call_alone(caller: Caller) -> None:
    """A caller that floods the node with input fills no memory: its call ends, the command and other callers go on."""
    info = await caller.create()
    running = caller.start(info.id, "cat", id="op", stdin=True)
    await running.started
    for piece in range(64):
        running.call.send_data(STDIN, piece * CHUNK, bytes(CHUNK))
    with pytest.raises(errors.ProtocolError, match="credit"):
        await running.call.answer
    assert (await caller.run(info.id, "exit", "0"))[0].exit_code == 0
    await caller.ask(m.CancelExec(sandbox=info.id, id="op"))
    assert (await caller.attach(info.id, "op").result()).outcome == "cancelled"


async def test_limits_are_named(caller: Caller, world: FakeWorld) -> None:
    info = await caller.create()
    world.usage[info.id] = Usage(0, 5)
    result, _ = await caller.run(info.id, "exit", "1")
    assert result.limit == "pids"
    result, _ = await caller.run(info.id, "exit", "1")
    assert result.limit is None, "the counters did not rise since"


async def test_commands_and_sandboxes_that_are_not_there(caller: Caller) -> None:
    with pytest.raises(errors.SandboxNotFound):
        await caller.run("n1-abcdefghij", "true")
    info = await caller.create()
    with pytest.raises(errors.ExecNotFound):
        await caller.attach(info.id, "nope").result()
    with pytest.raises(errors.ExecNotFound):
        await caller.ask(m.SignalExec(sandbox=info.id, id="nope", signal=9))
    with pytest.raises(errors.InvalidRequest):
        await caller.ask(m.SignalExec(sandbox=info.id, id="nope", signal=99))
    with pytest.raises(errors.EnvironmentNotFound):
        await caller.ask(m.CreateSandbox(spec=_other("nowhere"), key="k"))


def _other(base: str) -> SandboxSpec:
    return SandboxSpec(environment=EnvironmentRef(base=base))


async def test_lifetimes(caller: Caller, agent: Agent) -> None:
    watching = asyncio.ensure_future(lease.watch(agent))
    try:
        idle, short = await caller.create(idle_timeout=0.1), await caller.create(lifetime=0.1)
        busy = await caller.create(idle_timeout=0.1)
        running = caller.start(busy.id, "sleep", "0.5")
        assert "idle" in (await until_state(caller, idle.id, "stopped")).reason
        assert "lifetime" in (await until_state(caller, short.id, "stopped")).reason
        assert (await running.result()).exit_code == 0, "not idle while somebody waits for a command"
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


# --- the agent's own death


async def test_the_next_agent_takes_up_what_runs(tmp_path: Path, world: FakeWorld) -> None:
    config = config_for(tmp_path / "data")
    async with agent_on(config, FakeBackend(world)) as agent:
        first = Caller(agent)
        info = await first.create()
        ended = await first.run(info.id, "echo", "before")
        running = first.start(info.id, "cat", id="op", stdin=True)
        await running.started
        running.call.send_data(STDIN, 0, b"one ")
        async with asyncio.timeout(5):
            while running.stdout != b"one ":
                await asyncio.sleep(0)
    async with agent_on(config, FakeBackend(world)) as agent:
        second = Caller(agent)
        assert (await state_of(second, info.id)).pid == info.pid
        again = second.attach(info.id, "op")
        event = await again.started
        again.call.send_data(STDIN, event.stdin_offset, b"two")
        again.call.send_eof(STDIN, event.stdin_offset + 3)
        await again.result()
        assert again.stdout == b"one two"
        replayed = second.attach(info.id, ended[0].id)
        assert await replayed.result() == ended[0] and replayed.stdout == ended[1]
        assert (await second.run(info.id, "echo", "after"))[1] == b"after\n"


async def test_adoption_counts_as_use(tmp_path: Path, world: FakeWorld) -> None:
    """The last uses may not have reached the disk, and nobody could use it meanwhile."""
    config = config_for(tmp_path / "data")
    async with agent_on(config, FakeBackend(world)) as agent:
        info = await Caller(agent).create(idle_timeout=60)
        row = agent.registry.get(info.id)
        assert row is not None
        await agent.registry.update(info.id, last_used=row.last_used - 100)
    async with agent_on(config, FakeBackend(world)) as agent:
        row = agent.registry.get(info.id)
        assert row is not None and not lease.overdue(row, time.time(), busy=False)


async def test_an_end_while_the_agent_was_away(tmp_path: Path, world: FakeWorld) -> None:
    config = config_for(tmp_path / "data")
    async with agent_on(config, FakeBackend(world)) as agent:
        caller = Caller(agent)
        info = await caller.create()
        running = caller.start(info.id, "sleep", "0.05", id="op")
        await running.started
    guest = world.guests[info.id]
    async with asyncio.timeout(5):
        while next(iter(guest.ops.values())).done is None:
            await asyncio.sleep(0)
    async with agent_on(config, FakeBackend(world)) as agent:
        assert (await Caller(agent).attach(info.id, "op").result()).exit_code == 0


async def test_a_sandbox_that_died_with_the_agent_is_named(tmp_path: Path, world: FakeWorld) -> None:
    config = config_for(tmp_path / "data")
    async with agent_on(config, FakeBackend(world)) as agent:
        caller = Caller(agent)
        info = await caller.create()
        running = caller.start(info.id, "sleep", "1000", id="op")
        await running.started
    world.guests.pop(info.id).kill()
    world.pids.pop(info.id)
    async with agent_on(config, FakeBackend(world)) as agent:
        caller = Caller(agent)
        ended = await state_of(caller, info.id)
        assert ended.state == "failed" and "while the node agent was away" in ended.reason


class Stubborn(FakeBackend):
    """The first removal fails."""

    refused = False

    async def destroy(self, id: str) -> None:
        if not self.refused:
            self.refused = True
            raise TimeoutError(errno.ETIMEDOUT, "a cgroup still holds processes")
        await super().destroy(id)


async def test_a_removal_that_fails_at_the_start_holds_nobody_up(tmp_path: Path, world: FakeWorld) -> None:
    config = config_for(tmp_path / "data")
    async with agent_on(config, FakeBackend(world)) as agent:
        caller = Caller(agent)
        dead, alive = await caller.create(), await caller.create()
    world.guests.pop(dead.id).kill()
    world.pids.pop(dead.id)
    async with agent_on(config, Stubborn(world)) as agent:
        watching = asyncio.ensure_future(lease.watch(agent))
        try:
            caller = Caller(agent)
            assert (await caller.run(alive.id, "echo", "here"))[1] == b"here\n"
            assert "while the node agent was away" in (await until_state(caller, dead.id, "failed")).reason
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def test_half_made_and_unknown_sandboxes_are_swept(tmp_path: Path, world: FakeWorld) -> None:
    config = config_for(tmp_path / "data")
    async with agent_on(config, FakeBackend(world)) as agent:
        creating = asyncio.ensure_future(Caller(agent).create(labels={"fake.create": "hang"}))
        async with asyncio.timeout(5):
            while not world.half_made:
                await asyncio.sleep(0)
        (id,) = world.half_made
    creating.cancel()
    world.half_made.update((id, "n1-unknownunknown"))
    async with agent_on(config, FakeBackend(world)) as agent:
        assert not world.half_made
        assert (await state_of(Caller(agent), id)).state == "failed"


async def test_lists_come_in_pages(caller: Caller) -> None:
    made = sorted([(await caller.create()).id for _ in range(5)])
    seen: list[str] = []
    while True:
        request = m.ListSandboxes(limit=2, after=seen[-1] if seen else "")
        page = m.unpack(await caller.ask(request), tuple[SandboxInfo, ...])
        seen += [info.id for info in page]
        if len(page) < 2:
            break
    assert seen == made
    for number in range(3):
        await caller.run(made[0], "echo", str(number), "x" * 3000)
    first = m.unpack(await caller.ask(m.ListExecs(sandbox=made[0], limit=2)), tuple[ExecInfo, ...])
    rest = m.unpack(await caller.ask(m.ListExecs(sandbox=made[0], after=first[-1].id)), tuple[ExecInfo, ...])
    assert [info.argv[1] for info in (*first, *rest)] == [b"0", b"1", b"2"]
    assert sum(map(len, first[0].argv)) <= 1024


async def test_an_ended_flood_can_be_taken_up_again(caller: Caller) -> None:
    """More output than one window: the caller hears that it ran before it has taken any of it."""
    info = await caller.create()
    first = caller.start(info.id, "flood", "3000000", id="op")
    result = await first.result()
    second = caller.attach(info.id, "op")
    async with asyncio.timeout(5):
        assert (await second.started).pid == 0
        assert await second.result() == result
    assert second.stdout == first.stdout


async def test_the_key_of_a_stopped_sandbox_is_no_success(caller: Caller) -> None:
    info = await caller.create(key="k")
    await caller.ask(m.StopSandbox(sandbox=info.id))
    with pytest.raises(errors.SandboxStopped, match="this key"):
        await caller.create(key="k")


async def test_a_burst_is_admitted_only_as_far_as_there_is_room(tmp_path: Path, world: FakeWorld) -> None:
    config = msgspec.structs.replace(config_for(tmp_path / "data"), max_sandboxes=3)
    async with agent_on(config, FakeBackend(world)) as agent:
        caller = Caller(agent)
        made = await asyncio.gather(*(caller.create() for _ in range(10)), return_exceptions=True)
        assert sum(isinstance(one, SandboxInfo) for one in made) == len(world.guests) == 3
        assert all(isinstance(one, SandboxInfo | errors.AdmissionRefused) for one in made)


async def test_a_removal_that_failed_is_tried_again(
    caller: Caller, agent: Agent, world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = await caller.create()
    backend = backend_of(agent)
    destroy = backend.destroy

    async def busy(id: str) -> None:
        monkeypatch.setattr(backend, "destroy", destroy)
        raise OSError(16, "busy")

    monkeypatch.setattr(backend, "destroy", busy)
    with pytest.raises(errors.InternalError, match="busy"):
        await caller.ask(m.StopSandbox(sandbox=info.id))
    assert (await state_of(caller, info.id)).state == "stopping" and world.guests
    await caller.ask(m.StopSandbox(sandbox=info.id))
    assert (await state_of(caller, info.id)).state == "stopped" and not world.guests


async def test_the_api_hears_what_ended(agent: Agent, tmp_path: Path) -> None:
    """Placement counts what it adds; without news a node would look full for ever."""
    nodes, path = Nodes(1.0), tmp_path / "node.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    async with nodes.listening(listener):
        linked = asyncio.Event()
        keeping = asyncio.ensure_future(keep_linked(agent, path, linked.set))
        try:
            await asyncio.wait_for(linked.wait(), 5)
            peer = nodes.peer(NodeName("n1"))
            assert peer is not None
            for _ in range(3):
                peer.placed(_other("tiny"))
            assert peer.info.sandboxes == 3
            async with asyncio.timeout(5):
                while peer.info.sandboxes:
                    await asyncio.sleep(0)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
