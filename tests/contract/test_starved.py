"""A guest that does not answer: given up, unless it only waits for its share of the processors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from barchan.backends.fake import FakeBackend, FakeGuest, FakeWorld
from barchan.node import lease, sandbox
from barchan.node.agent import Agent
from barchan.wire.frames import Frame, FrameType
from tests.contract.node_rig import Caller, agent_on, config_for


class SilentGuest(FakeGuest):
    """It greets, and then does nothing; counts how often it is asked whether it lives."""

    asked = 0

    def take(self, frame: Frame) -> None:
        self.asked += frame.type == FrameType.PING
        if frame.type == FrameType.HELLO:
            super().take(frame)


class Crowded(FakeBackend):
    """Whose sandboxes are said to be short of processor time."""

    runs = True
    grows = 0.0
    """Seconds more with each question."""
    waited = 0.0

    def pids(self, id: str) -> tuple[int, ...]:
        return ()

    def throttled(self, id: str) -> float:
        self.waited += self.grows
        return self.waited

    def runnable(self, id: str) -> bool:
        return self.runs


@contextlib.asynccontextmanager
async def silent_sandbox(path: Path, backend: Crowded) -> AsyncIterator[tuple[Agent, str, SilentGuest]]:
    """With a command that waits to be started, and the agent's watch running."""
    async with agent_on(config_for(path), backend) as agent:
        caller = Caller(agent)
        info = await caller.create()
        guest = backend.world.guests[info.id]
        guest.__class__ = SilentGuest
        assert isinstance(guest, SilentGuest)
        caller.start(info.id, "true")
        watching = asyncio.ensure_future(lease.watch(agent))
        try:
            yield agent, info.id, guest
        finally:
            watching.cancel()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "START_SECONDS", 0.02)


async def test_one_that_waits_for_its_share_of_cpu_lives(tmp_path: Path) -> None:
    backend = Crowded(FakeWorld())
    backend.grows = 0.1
    async with silent_sandbox(tmp_path / "data", backend) as (agent, id, guest), asyncio.timeout(10):
        while guest.asked < 5:
            await asyncio.sleep(0)
        assert id in agent.sandboxes
        backend.grows = 0.0
        while id in agent.sandboxes:
            await asyncio.sleep(0)


@pytest.mark.parametrize(("runs", "grows"), [(True, 0.0), (False, 0.1)], ids=["nobody is throttled", "it is stopped"])
async def test_one_that_could_answer_is_given_up(tmp_path: Path, runs: bool, grows: float) -> None:
    backend = Crowded(FakeWorld())
    backend.runs, backend.grows = runs, grows
    async with silent_sandbox(tmp_path / "data", backend) as (agent, id, _), asyncio.timeout(10):
        while id in agent.sandboxes:
            await asyncio.sleep(0)
