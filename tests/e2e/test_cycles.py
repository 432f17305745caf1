"""Sandboxes that come and go leave nothing: `./dev bench cycles` in small."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan import Client
from bench.cycles import figures, measure, per_thousand
from tests.e2e.conftest import make_tiny
from tests.server import Server, own_server

CYCLES, WARM = 150, 50
OF_THE_WHOLE_HOST = {"growth_SUnreclaim", "growth_dying_groups"}
"""Other tests run at the same time."""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    """A server that nobody else uses."""
    with own_server("cycles", "--scratch-bytes", "512m") as server:
        server.run("env", "import", "tiny", str(make_tiny(tmp_path)))
        yield server


async def test_nothing_grows(own: Server) -> None:
    found = await measure(own.data, CYCLES, WARM, samples=1, settle=1)
    grown = [figure for figure in figures(found, CYCLES) if figure.name not in OF_THE_WHOLE_HOST and not figure.ok]
    assert not grown, [*(figure.text() for figure in grown), *per_thousand(found, CYCLES)]


async def test_an_api_hears_of_sandboxes_that_ended(own: Server) -> None:
    async with Client(data=own.data) as client:
        sandboxes = [await client.create("tiny") for _ in range(3)]
        assert (await client.nodes())[0].sandboxes >= 3
        for sandbox in sandboxes:
            await sandbox.stop()
        async with asyncio.timeout(10):
            while (await client.nodes())[0].sandboxes:
                await asyncio.sleep(0.05)
