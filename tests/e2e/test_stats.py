"""What a sandbox uses, measured."""

from __future__ import annotations

import os
import time

import pytest

from barchan import Client, Sandbox, SandboxStopped
from tests.e2e.conftest import SMALL

MIB = 1 << 20


async def test_what_it_uses_is_what_it_did(sandbox: Sandbox) -> None:
    before = await sandbox.stats()
    assert before.id == sandbox.id and before.since == sandbox.info.created and before.since < before.at <= time.time()
    assert before.processes == 1 and before.pids >= 1 and 0 < before.memory < SMALL.memory
    sleeper = await sandbox.start("a=$(head -c 20000000 /dev/zero | tr '\\0' x); echo ready; sleep 600; echo ${#a}")
    assert await anext(aiter(sleeper.stdout)) == b"ready\n"
    await sandbox.run("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
    during = await sandbox.stats()
    assert during.processes >= 2 and during.pids >= during.processes
    assert during.memory > before.memory + 10 * MIB
    assert during.memory_peak is None or during.memory_peak >= during.memory
    assert during.cpu_user + during.cpu_system > before.cpu_user + before.cpu_system + 0.05
    await sleeper.cancel()
    await sleeper.wait()
    after = await sandbox.stats()
    assert after.processes == 1 and after.cpu_user >= during.cpu_user


async def test_disk_is_what_was_written(sandbox: Sandbox) -> None:
    before = await sandbox.stats()
    await sandbox.files.write("/big", os.urandom(8 * MIB))
    await sandbox.run("sync")
    await until_disk(sandbox, before.disk + 8 * MIB)


async def until_disk(sandbox: Sandbox, size: int) -> None:
    """The figure follows the file system's commits."""
    for _ in range(200):
        if (await sandbox.stats()).disk >= size:
            return
        os.sync()
    pytest.fail("the figure did not follow")


async def test_limits_that_were_hit_are_counted(sandbox: Sandbox) -> None:
    await sandbox.run("a=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#a}")
    assert (await sandbox.stats()).oom_kills > 0
    await sandbox.run("for i in $(seq 200); do sleep 30 & done", timeout=10, grace=0)
    assert (await sandbox.stats()).pids_hits > 0


async def test_looking_is_no_use(client: Client, sandbox: Sandbox) -> None:
    used = (await client.get(sandbox.id)).info.last_used
    await sandbox.stats()
    assert (await client.get(sandbox.id)).info.last_used == used


async def test_what_is_gone_says_so(client: Client, tiny_env: str) -> None:
    sandbox = await client.create(tiny_env, limits=SMALL)
    await sandbox.stop()
    with pytest.raises(SandboxStopped):
        await sandbox.stats()
