"""A sandbox that uses up its share of the processors is slow, not dead; one whose first process is stopped is found out."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from barchan import Client, Limits, errors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SPIN = """busybox mkfifo /go; i=0
while [ $i -lt 400 ]; do (read line < /go; while :; do :; done) & i=$((i + 1)); done
echo all; echo > /go; wait"""
"""All at once: the later ones would wait for a turn among the earlier."""
GIVEN_UP = 26.0
"""Seconds after which one that does not answer has been given up: 10 for the command, 10 for the question, some to be looked at."""


async def test_one_that_only_waits_for_its_share_lives(client: Client, tiny_env: str) -> None:
    async with await client.create(tiny_env, limits=Limits(cpus=0.1)) as box:
        busy = await box.start(["/bin/sh", "-c", SPIN])
        assert await busy.stdout.read() == b"all\n"
        try:
            async with asyncio.timeout(GIVEN_UP):
                while True:
                    await box.run(["true"])
        except TimeoutError:
            pass
        except errors.SandboxUnavailable as error:
            assert "did not start" in error.message  # the command was given up, not the sandbox
        assert (await box.refresh()).state == "ready"


async def test_one_that_is_stopped_is_given_up(client: Client, tiny_env: str) -> None:
    async with await client.create(tiny_env, limits=Limits(cpus=0.1)) as box:
        busy = await box.start(["/bin/sh", "-c", SPIN])
        assert await busy.stdout.read() == b"all\n"
        os.kill((await box.refresh()).pid, signal.SIGSTOP)
        with pytest.raises(errors.SandboxUnavailable, match="does not answer"):
            async with asyncio.timeout(2 * GIVEN_UP):
                await box.run(["true"])
        assert (await box.refresh()).state in ("failing", "failed")
