"""What waits for the disk, and what a power cut may leave: the agent over the scripted backend."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from barchan.backends.fake import FakeBackend, FakeWorld
from barchan.config import Layout
from barchan.errors import InternalError
from barchan.node import registry
from barchan.node.agent import Agent
from barchan.node.registry import Registry
from barchan.node.rows import stored
from barchan.spec import EnvironmentRef, SandboxInfo, SandboxSpec, SandboxState
from barchan.wire import messages as m
from tests.contract.node_rig import Caller, agent_on, config_for


async def test_a_result_waits_until_its_sandbox_is_on_disk(tmp_path: Path) -> None:
    async with agent_on(config_for(tmp_path / "data"), FakeBackend(FakeWorld())) as agent:
        caller = Caller(agent)
        info = await caller.create()
        known = agent.sandboxes[info.id].known = asyncio.get_running_loop().create_future()
        running = caller.start(info.id, "echo", "x", id="e")
        async with asyncio.timeout(5):
            while not (seen := agent.recorder.exec_state(info.id, "e")) or not seen.ended:
                await asyncio.sleep(0)
        assert not running.call.answer.done(), "a power cut would leave a result of a sandbox that nobody knows"
        known.set_result(None)
        assert (await running.result()).exit_code == 0


@pytest.mark.parametrize("error", [InternalError("registry: sync: input/output error"), RuntimeError("sync: a defect")])
async def test_without_its_sandbox_on_disk_no_result_is_acknowledged(tmp_path: Path, error: Exception) -> None:
    async with agent_on(config_for(tmp_path / "data"), FakeBackend(FakeWorld())) as agent:
        caller = Caller(agent)
        info = await caller.create()
        known = agent.sandboxes[info.id].known = asyncio.get_running_loop().create_future()
        known.set_exception(error)
        with pytest.raises(InternalError, match="sync"):
            await caller.run(info.id, "echo", "x")


async def test_a_claim_does_not_wait_for_the_disk_and_says_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, release = threading.Event(), threading.Event()

    def held(fd: int) -> None:
        asked.set()
        assert release.wait(20)

    monkeypatch.setattr(os, "fdatasync", held)
    async with await Registry.open(Layout(tmp_path)) as registry:
        spec = SandboxSpec(environment=EnvironmentRef(base="tiny"))
        claim = await registry.claim("n-1", spec, created=1.0, expires=2.0)
        assert await asyncio.to_thread(asked.wait, 20) and claim.fresh and not claim.synced.done()
        release.set()
        await claim.synced


@pytest.mark.parametrize(("failing", "state"), [(False, "stopped"), (True, "failed")])
async def test_an_end_on_record_is_believed_where_the_registry_lost_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool, state: SandboxState
) -> None:
    world, data = FakeWorld(), tmp_path / "data"
    async with agent_on(config_for(data), FakeBackend(world)) as agent:
        info = await Caller(agent).create()
        _undone(agent, monkeypatch)
        if failing:
            agent.broken(info.id, "it ended by itself")
            while agent.recorder.end_of(info.id) is None:
                await asyncio.sleep(0)
        else:
            await Caller(agent).ask(m.StopSandbox(sandbox=info.id))
    monkeypatch.undo()
    async with agent_on(config_for(data), FakeBackend(world)) as agent:
        found = m.unpack(await Caller(agent).ask(m.GetSandbox(sandbox=info.id)), SandboxInfo)
        assert (found.state, found.reason) == (state, "it ended by itself" if failing else "stopped")


def _undone(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing reaches the registry's file, as when a power cut takes back what was not synced."""
    before = {row.id: stored(row) for row in agent.registry.rows()}
    monkeypatch.setattr(registry, "stored", lambda row: before[row.id])
