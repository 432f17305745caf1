"""Creates that wait for an image: seen, stopped, joined, given up; and pulling by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from barchan import errors
from barchan.backends.fake import FakeBackend, FakeWorld
from barchan.environments import PullProgress
from barchan.node.agent import Agent
from barchan.spec import EnvironmentRef, SandboxInfo, SandboxSpec
from barchan.wire import messages as m
from barchan.wire.frames import Frame
from barchan.wire.link import Call
from tests.contract.node_rig import Caller, agent_on, config_for

IMAGE = "docker://docker.io/library/python:3"
SPEC = SandboxSpec(environment=EnvironmentRef(base=IMAGE), labels={"k": "v"}, secrets={"A": "secret"})
HALF = PullProgress(image=IMAGE, phase="pull", layer=1, layers=2, done=5, total=10, node="n1")


@pytest.fixture
def world() -> FakeWorld:
    world = FakeWorld()
    world.registry[IMAGE] = asyncio.Event()
    return world


@pytest.fixture
async def caller(tmp_path: Path, world: FakeWorld) -> AsyncIterator[Agents]:
    async with agent_on(config_for(tmp_path / "data"), FakeBackend(world)) as agent:
        yield Agents(agent)


class Agents(Caller):
    """A caller that hears events."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.heard: asyncio.Queue[PullProgress] = asyncio.Queue()

    def begin(self, request: m.Request) -> Call:
        def on_frame(frame: Frame) -> None:
            self.heard.put_nowait(m.unpack(frame.payload, PullProgress))

        return self.link.call(m.pack_call(request), on_frame)

    async def create_begun(self, key: str) -> Call:
        call = self.begin(m.CreateSandbox(spec=SPEC, key=key))
        assert await self.heard.get() == HALF
        return call

    async def listed(self, **filters: object) -> list[SandboxInfo]:
        request = m.ListSandboxes(**filters)  # type: ignore[arg-type]
        return list(m.unpack(await self.ask(request), tuple[SandboxInfo, ...]))


async def test_it_is_listed_with_how_far_its_image_is(caller: Agents, world: FakeWorld) -> None:
    call = await caller.create_begun("k")
    [info] = await caller.listed(labels={"k": "v"})
    assert (info.state, info.pulling, info.environment.base) == ("creating", HALF, IMAGE)
    assert m.unpack(await caller.ask(m.GetSandbox(sandbox=info.id)), SandboxInfo) == info
    assert not await caller.listed(states=("ready",)) and await caller.listed(states=("creating",), environment=IMAGE)
    with pytest.raises(errors.SandboxUnavailable, match="creating"):
        await caller.run(info.id, "true")
    with pytest.raises(errors.SandboxUnavailable, match="creating"):
        await caller.ask(m.GetStats(sandbox=info.id))
    assert m.unpack(await caller.ask(m.ListExecs(sandbox=info.id)), tuple[object, ...]) == ()
    world.registry[IMAGE].set()
    made = m.unpack(await call.answer, SandboxInfo)
    assert (made.id, made.state, made.pulling) == (info.id, "ready", None)
    assert [one.id for one in await caller.listed()] == [info.id]


async def test_a_stop_ends_the_wait(caller: Agents, world: FakeWorld) -> None:
    call = await caller.create_begun("k")
    [info] = await caller.listed()
    stopped = m.unpack(await caller.ask(m.StopSandbox(sandbox=info.id)), SandboxInfo)
    assert (stopped.id, stopped.state, stopped.pulling) == (info.id, "stopped", None)
    with pytest.raises(errors.SandboxStopped, match="waited for an image"):
        await call.answer
    assert not await caller.listed(ended=True) and not world.guests


async def test_one_that_gives_up_leaves_nothing_and_harms_nobody(caller: Agents, world: FakeWorld) -> None:
    one, two = await caller.create_begun("one"), await caller.create_begun("two")
    assert len(await caller.listed()) == 2
    one.abandon()
    while len(await caller.listed()) > 1:
        await asyncio.sleep(0)
    world.registry[IMAGE].set()
    assert m.unpack(await two.answer, SandboxInfo).state == "ready"
    assert len(world.guests) == 1


async def test_creates_of_one_key_are_one_sandbox_to_be(caller: Agents, world: FakeWorld) -> None:
    calls = [await caller.create_begun("k") for _ in range(3)]
    [waiting] = await caller.listed()
    world.registry[IMAGE].set()
    made = {m.unpack(await call.answer, SandboxInfo).id for call in calls}
    assert made == {waiting.id} and len(world.guests) == 1


async def test_an_image_that_does_not_come(caller: Agents, world: FakeWorld) -> None:
    del world.registry[IMAGE]
    with pytest.raises(errors.ImageNotFound):
        await caller.ask(m.CreateSandbox(spec=SPEC, key="k"))
    assert not await caller.listed(ended=True)


async def test_pulling_by_itself(caller: Agents, world: FakeWorld) -> None:
    call = caller.begin(m.PullImage(image=IMAGE))
    assert await caller.heard.get() == HALF
    world.registry[IMAGE].set()
    assert m.unpack(await call.answer, m.EnvironmentInfo).reference == IMAGE
    assert m.unpack(await caller.ask(m.CreateSandbox(spec=SPEC, key="k")), SandboxInfo).state == "ready"
    assert caller.heard.empty(), "it is there"
