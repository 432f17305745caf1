"""What is recorded of sandboxes that have ended: as long as the node remembers them, also after a restart, or why not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from barchan import errors
from barchan.backends.fake import FakeBackend, FakeWorld
from barchan.config import NodeConfig
from barchan.node import past
from barchan.node.agent import Agent
from barchan.node.recorder import Recorder
from barchan.node.registry import Registry
from barchan.spec import ExecInfo
from barchan.wire import messages as m
from barchan.wire.frames import STDIN
from tests.contract.node_rig import Caller, agent_on, config_for


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return msgspec.structs.replace(config_for(tmp_path / "data"), segment_bytes=200_000)


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


@pytest.fixture
async def agent(config: NodeConfig, world: FakeWorld) -> AsyncIterator[Agent]:
    async with agent_on(config, FakeBackend(world)) as agent:
        yield agent


@pytest.fixture
async def caller(agent: Agent) -> Caller:
    return Caller(agent)


@contextlib.asynccontextmanager
async def restarted(config: NodeConfig, world: FakeWorld) -> AsyncIterator[Agent]:
    """As after a long time: only the newest segment is read when the log is opened."""
    async with await Registry.open(config.layout) as registry:
        until = time.time() + 7200
        async with await Recorder.open(config.layout, config, since=until) as recorder:
            agent = Agent(config, registry, recorder, {"container": FakeBackend(world)})
            assert not all(segment.known for segment in recorder._log.segments())
            yield agent
            await agent.close()


async def execs(caller: Caller, sandbox: str, *, partial: bool = False) -> list[ExecInfo]:
    answer = await caller.ask(m.ListExecs(sandbox=sandbox, partial=partial))
    return list(m.unpack(answer, tuple[ExecInfo, ...]))


async def ended(caller: Caller) -> str:
    """The id of a sandbox that ran `e`, `f` with much output, `n`, and `c`, which was running when it was stopped."""
    id = (await caller.create()).id
    for name, *argv in (("e", "echo", "hello"), ("f", "flood", "700000"), ("n", "nonsense")):
        await caller.start(id, *argv, id=name).result()
    cat = caller.start(id, "cat", id="c", stdin=True)
    await cat.started
    cat.call.send_data(STDIN, 0, b"typed")
    async with asyncio.timeout(10):
        while cat.stdout != b"typed":
            await asyncio.sleep(0)
    await caller.ask(m.StopSandbox(sandbox=id))
    return id


async def check(caller: Caller, id: str) -> None:
    found = await execs(caller, id)
    assert [info.id for info in found] == ["e", "f", "n", "c"]
    assert [info.result and info.result.outcome for info in found] == ["exited", "exited", "not_found", "unknown"]
    assert [info.argv[0] for info in found] == [b"echo", b"flood", b"nonsense", b"cat"]
    for name, output in (("e", b"hello\n"), ("f", b"x" * 700_000)):
        again = caller.attach(id, name)
        assert (await again.result()).exit_code == 0 and again.stdout == output
    cat = caller.attach(id, "c")
    with pytest.raises(errors.SandboxStopped):
        await cat.result()
    assert cat.stdout == b"typed", "what it wrote is there, though nobody knows how it ended"
    rest = caller.attach(id, "f", offset=699_990)
    assert (await rest.result()).exit_code == 0 and rest.stdout == b"x" * 10
    page = m.unpack(await caller.ask(m.ListExecs(sandbox=id, after="e", limit=2)), tuple[ExecInfo, ...])
    assert [info.id for info in page] == ["f", "n"]
    with pytest.raises(errors.ExecNotFound):
        await caller.attach(id, "never").result()
    with pytest.raises(errors.ExecNotFound):
        await caller.ask(m.ListExecs(sandbox=id, after="never"))


async def test_its_commands_can_be_read(caller: Caller) -> None:
    await check(caller, await ended(caller))


async def test_also_after_a_restart(config: NodeConfig, world: FakeWorld) -> None:
    async with agent_on(config, FakeBackend(world)) as first:
        id = await ended(Caller(first))
    async with agent_on(config, FakeBackend(world)) as second:
        await check(Caller(second), id)
    async with restarted(config, world) as third:
        await check(Caller(third), id)
        assert all(segment.known for segment in third.recorder._log.segments()[:-1]), "each is read once"


async def test_one_that_never_ran_anything(caller: Caller) -> None:
    id = (await caller.create()).id
    assert await execs(caller, id) == []
    await caller.ask(m.StopSandbox(sandbox=id))
    assert await execs(caller, id) == []


async def test_memory_does_not_grow_with_what_was_asked_for(
    agent: Agent, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past, "KEPT_COMMANDS", 9)
    ids = [await ended(caller) for _ in range(4)]
    for id in ids:
        await asyncio.gather(*(execs(caller, id) for _ in range(5)))
    assert list(agent.recorder._past._kept) == ids[-2:], "four commands each"
    assert not any(agent.recorder._view.get(id) for id in ids)


async def test_what_is_not_asked_for_again_is_let_go(
    agent: Agent, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past, "KEPT_SECONDS", 0.0)
    await execs(caller, await ended(caller))
    async with asyncio.timeout(10):
        while agent.recorder._past._kept:
            await asyncio.sleep(0)


async def test_what_the_log_does_not_hold_any_more_is_said(config: NodeConfig, world: FakeWorld) -> None:
    config = msgspec.structs.replace(config, log_bytes=9_000_000, log_most=1 << 30, sandbox_log=1 << 30)
    async with agent_on(config, FakeBackend(world)) as agent:
        caller = Caller(agent)
        old, live = (await caller.create()).id, (await caller.create()).id
        await caller.start(old, "echo", "first", id="a").result()
        await caller.start(old, "flood", "6000000", id="b").result()
        await caller.start(live, "echo", "x").result()
        await caller.start(old, "echo", "last", id="z").result()
        await caller.ask(m.StopSandbox(sandbox=old))
        assert len(await execs(caller, old)) == 3, "nothing was removed yet"
        await caller.start(live, "flood", "6000000").result()
        with pytest.raises(errors.RecordGone, match="all commands"):
            await execs(caller, old)
        assert [info.id for info in await execs(caller, old, partial=True)] == ["a", "b", "z"], "begun beside `live`"
        for name, text in (("a", b"first\n"), ("z", b"last\n")):
            kept = caller.attach(old, name)
            assert (await kept.result()).exit_code == 0 and kept.stdout == text
        broken = caller.attach(old, "b")
        with pytest.raises(errors.RecordGone):
            await broken.result()
        await caller.ask(m.StopSandbox(sandbox=live))
        other = (await caller.create()).id
        await caller.start(other, "flood", "6000000").result()
        assert await execs(caller, old, partial=True) == []
        with pytest.raises(errors.RecordGone, match="command a"):
            await caller.attach(old, "a").result()
