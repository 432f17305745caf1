"""A client whose connection breaks gets what it asked for once it is back, exactly once."""

from __future__ import annotations

import asyncio

import pytest

from barchan import Client, EnvironmentRef, SandboxSpec
from tests.rig import cut
from tests.server import Server


@pytest.mark.parametrize("after_ms", [0, 1, 2, 4, 8, 16])
async def test_a_create_survives_the_loss_of_its_connection(server: Server, tiny_env: str, after_ms: int) -> None:
    spec = SandboxSpec(environment=EnvironmentRef(base=tiny_env), labels={"lost": str(after_ms)})
    async with Client(data=server.data) as client:
        await client.list()  # connected
        creating = asyncio.ensure_future(client.create_from(spec))
        await asyncio.sleep(after_ms / 1000)
        cut(client)
        sandbox = await asyncio.wait_for(creating, 30)
        try:
            assert (await sandbox.run("echo here")).stdout == b"here\n"
            assert [box.id for box in await client.list(labels={"lost": str(after_ms)})] == [sandbox.id]
        finally:
            await sandbox.stop()
