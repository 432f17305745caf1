"""Memory that the kernel charges to nobody cannot be taken without end: file locks."""

from __future__ import annotations

import asyncio

import pytest

from barchan import Client, Limits, errors
from barchan.kernel.filelocks import LockMeter
from barchan.spec import MIB
from tests.host import spawn_site

LOCKS = 450_000
"""Some 80 MiB: what starts the search is 32."""


@pytest.mark.parametrize("how", ["", "shared"])
async def test_who_takes_locks_without_end_is_ended_and_the_neighbour_stays(
    client: Client, tiny_env: str, how: str
) -> None:
    spawn_site.build_programs()
    meter = LockMeter()
    before = meter.size()
    async with (
        await client.create(tiny_env, limits=Limits(memory=64 * MIB)) as hostile,
        await client.create(tiny_env) as neighbour,
    ):
        await neighbour.files.upload(spawn_site.NATIVE / "build" / "hold_locks", "/hold")
        await hostile.files.upload(spawn_site.NATIVE / "build" / "hold_locks", "/hold")
        keeper = await neighbour.start(["/hold", "15000"])
        assert await keeper.stdout.read() == b"held\n"
        taker = await hostile.start(["/hold", str(LOCKS), how])
        with pytest.raises(errors.SandboxUnavailable, match="out of memory .oom.: .* file locks"):
            async with asyncio.timeout(30):
                await taker.wait()
        info = await hostile.refresh()
        assert info.state in ("failing", "failed") and "file locks" in info.reason
        while meter.size() > before + 30 * MIB:  # the kernel gives them up as the process ends
            await asyncio.sleep(0)
        assert (await neighbour.run("echo alive")).stdout == b"alive\n"
        await keeper.cancel()
    meter.close()
