"""Packing through the node agent over the scripted backend, and through the API: what a key promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan import errors
from barchan.backends.fake import FakeBackend, FakeWorld
from barchan.node.agent import Agent
from barchan.packing import PackedLayer, PackOrder
from barchan.spec import EnvironmentRef, SandboxSpec
from barchan.trajectory.record import Kind, PackEnded
from barchan.wire import messages as m
from tests.contract.api_site import http, site
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


def packing(sandbox: str, name: str = "made", key: str = "k", **order: Any) -> m.PackDiff:
    return m.PackDiff(sandbox=sandbox, key=key, order=PackOrder(name=name, **order))


async def test_a_key_packs_once(caller: Caller, agent: Agent, world: FakeWorld) -> None:
    info = await caller.create()
    wanted = packing(info.id)
    answers = await asyncio.gather(*(caller.ask(wanted) for _ in range(4)))
    packed = m.unpack(answers[0], PackedLayer)
    assert packed.name == "made" and set(answers) == {answers[0]} and len(world.packed) == 1
    world.packed.clear()
    assert await caller.ask(wanted) == answers[0], "from the record"
    with pytest.raises(errors.Conflict):
        await caller.ask(packing(info.id, whole=True))
    spec = SandboxSpec(environment=EnvironmentRef(base="made"))
    await caller.ask(m.CreateSandbox(spec=spec, key="of-it"))
    kinds = [record.kind async for record in agent.recorder.history(info.id)]
    assert kinds.count(Kind.PACK) == kinds.count(Kind.PACK_END) == 1


async def test_a_key_packs_once_also_across_a_killed_agent(tmp_path: Path, world: FakeWorld) -> None:
    config = config_for(tmp_path / "data")
    async with agent_on(config, FakeBackend(world)) as agent:
        info = await Caller(agent).create()
        made = await Caller(agent).ask(packing(info.id, key="made"))
        # As far as one comes that is killed before it knows what became of it.
        await agent.recorder.begin_pack(info.id, "killed", packing(info.id).order)
        (packed,) = world.packed.values()
        world.packed[info.id, "killed"] = msgspec.structs.replace(packed, version=7)
        await agent.recorder.begin_pack(info.id, "early", packing(info.id).order)
    async with agent_on(config, FakeBackend(world)) as agent:
        caller = Caller(agent)
        assert await caller.ask(packing(info.id, key="made")) == made
        assert m.unpack(await caller.ask(packing(info.id, key="killed")), PackedLayer).version == 7
        assert m.unpack(await caller.ask(packing(info.id, key="early")), PackedLayer).version == 1
        await caller.ask(m.StopSandbox(sandbox=info.id))
        assert await caller.ask(packing(info.id, key="made")) == made, "what was made is there when the sandbox is not"
        with pytest.raises(errors.SandboxStopped):
            await caller.ask(packing(info.id, key="late"))


async def test_a_packing_that_failed_is_tried_again(caller: Caller, world: FakeWorld) -> None:
    info = await caller.create(labels={"fake.pack": "fail:pack"})
    for _ in range(2):
        with pytest.raises(errors.CreateFailed, match="scripted"):
            await caller.ask(packing(info.id))
    world.labels[info.id] = {}
    assert m.unpack(await caller.ask(packing(info.id)), PackedLayer).version == 1


async def test_a_sandbox_that_ends_while_it_is_packed_says_so(caller: Caller, agent: Agent) -> None:
    info = await caller.create(labels={"fake.pack": "hang"})
    call = caller.link.call(m.pack_call(packing(info.id)))
    second = caller.link.call(m.pack_call(packing(info.id)))
    while not agent.sandboxes[info.id].busy:
        await asyncio.sleep(0)
    second.abandon()
    await caller.ask(m.StopSandbox(sandbox=info.id))
    with pytest.raises(errors.SandboxStopped):
        await call.answer


async def test_a_packing_that_nobody_wants_is_given_up(caller: Caller, agent: Agent) -> None:
    info = await caller.create(labels={"fake.pack": "hang"})
    call = caller.link.call(m.pack_call(packing(info.id)))
    while not agent.sandboxes[info.id].busy:
        await asyncio.sleep(0)
    call.abandon()
    async with asyncio.timeout(5):
        while agent.sandboxes[info.id].busy:
            await asyncio.sleep(0)
    ends = [record.body async for record in agent.recorder.history(info.id) if record.kind == Kind.PACK_END]
    assert ends == [PackEnded(None, "cancelled")]


async def test_a_backend_that_does_not_pack_says_so(tmp_path: Path, world: FakeWorld) -> None:
    async with agent_on(config_for(tmp_path / "data"), FakeBackend(world, pack=False)) as agent:
        caller = Caller(agent)
        info = await caller.create()
        with pytest.raises(errors.NotSupported, match="pack"):
            await caller.ask(packing(info.id))


async def test_over_http(tmp_path: Path) -> None:
    async with site(tmp_path) as place, place.node() as node, http(place.url) as ask:
        _, info = await ask("POST", "/v1/sandboxes", {"environment": {"base": "tiny"}})
        path, key = f"/v1/sandboxes/{info['id']}/pack", {"Idempotency-Key": "k1"}
        order = {
            "name": "made",
            "whole": True,
            "scrub": {"also": ["srv/*"], "keep": ["logs"]},
            "config": {"user": "ann", "env": {"A": "b"}, "entrypoint": ["/bin/sh"]},
        }
        status, packed = await ask("POST", path, order, headers=key)
        assert (status, packed["reference"], packed["layers"], packed["left_out"]) == (201, "made@1", 2, {"logs": 2})
        assert (await ask("POST", path, order, headers=key)) == (201, packed)
        assert (await ask("POST", path, {"name": "other"}, headers=key))[0] == 409
        sent = [call.order for call in node.calls if isinstance(call, m.PackDiff)]
        assert sent[0] == msgspec.convert(order, PackOrder) and sent[0] == sent[1]


@pytest.mark.parametrize(
    ("order", "field"),
    [
        ({}, "name"),
        ({"name": "Made"}, "name"),
        ({"name": "made", "scrub": {"also": ["/etc"]}}, "scrub.also"),
        ({"name": "made", "scrub": {"also": ["x"] * 1001}}, "scrub.also"),
        ({"name": "made", "scrub": {"keep": ["logz"]}}, "scrub.keep[0]"),
        ({"name": "made", "scrub": {"only": []}}, "scrub.only"),
        ({"name": "made", "config": {}}, "config"),
        ({"name": "made", "whole": True, "config": {"workdir": "srv"}}, "config.workdir"),
        ({"name": "made", "whole": True, "config": {"env": {"a=b": "c"}}}, "config.env"),
        ({"name": "made", "whole": True, "config": {"shell": "sh"}}, "config.shell"),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, order: dict[str, Any], field: str) -> None:
    async with site(tmp_path) as place, place.node() as node, http(place.url) as ask:
        _, info = await ask("POST", "/v1/sandboxes", {"environment": {"base": "tiny"}})
        status, error = await ask("POST", f"/v1/sandboxes/{info['id']}/pack", order)
        assert (status, error["code"], error["field"]) == (400, "invalid_request", field)
        assert not [call for call in node.calls if isinstance(call, m.PackDiff)]
