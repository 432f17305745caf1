"""Over-use is answered by name, the host and the neighbours stay untouched, and a broken sandbox says so."""

from __future__ import annotations

import os
import signal
import time

import pytest

from barchan import Client, Limits, Sandbox, errors
from barchan.sizes import size
from tests.rig import beside, pause, within

MIB = 1 << 20
EAT = "a=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#a}"
"""A shell that grows to some 400 MB."""


async def test_a_limit_is_told_of_the_command_that_met_it(client: Client, tiny_env: str) -> None:
    """A kill that a command survives is no reason for the failure of the next."""
    async with await client.create(tiny_env, limits=Limits(memory=32 * MIB)) as sandbox:
        met = await sandbox.run("sh -c 'x=a; while :; do x=$x$x; done'; exit 0")
        assert met.exit_code == 0 and (await sandbox.stats()).oom_kills > 0
        assert (await sandbox.run("exit 3")).limit is None


async def test_oom_is_named(client: Client, tiny_env: str) -> None:
    """CASES 14: over-use is named."""
    async with await client.create(tiny_env, limits=Limits(memory=64 * MIB)) as box:
        done = await box.run(EAT)
        assert (done.limit, done.exit_code) == ("oom", 137)
        assert (await box.run("echo alive")).stdout == b"alive\n", "its first process was spared"


async def test_a_full_process_table_stops_commands_but_not_files(client: Client, tiny_env: str) -> None:
    """CASES 13: broken sandboxes say so."""
    async with await client.create(tiny_env, limits=Limits(pids=16)) as box:
        sleepers = []
        with pytest.raises(errors.SandboxUnavailable, match="process"):
            for _ in range(20):
                sleepers.append(await box.start(["sleep", "600"]))
        assert len(sleepers) >= 12
        await box.files.write("/tmp/still", b"works")
        assert await box.files.read("/tmp/still") == b"works"
        assert len(await box.processes()) >= len(sleepers)
        await sleepers[0].cancel()
        await sleepers[0].wait()
        assert (await box.run(["echo", "alive"])).stdout == b"alive\n"


async def test_disk_full_is_named(client: Client, tiny_env: str) -> None:
    """CASES 14: over-use is named."""
    async with await client.create(tiny_env, limits=Limits(disk=16 * MIB)) as box:
        done = await box.run("dd if=/dev/urandom of=/big bs=1M count=64")
        assert (done.limit, done.exit_code) == ("disk_full", 1)
        with pytest.raises(errors.SandboxDiskFull):
            await box.files.write("/more", os.urandom(4 * MIB))
        assert (await box.run("rm /big; echo alive")).stdout == b"alive\n"


async def test_open_files_are_limited(client: Client, tiny_env: str) -> None:
    """CASES 14: over-use is named."""
    async with await client.create(tiny_env, limits=Limits(files=128)) as box:
        assert (await box.run("ulimit -n")).stdout == b"128\n"


async def test_limits_do_not_add_up(client: Client, tiny_env: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="ever") as refused:
        await client.create(tiny_env, limits=Limits(memory=1 << 50))
    assert refused.value.field == "limits.memory" and not refused.value.retry
    assert size((await client.nodes())[0].memory_total) in refused.value.hint


# --- a sandbox that is broken from inside or outside


async def test_the_first_process_cannot_be_killed_from_inside(sandbox: Sandbox) -> None:
    """CASES 13: broken sandboxes say so."""
    await sandbox.run("kill -9 1; kill -15 1; kill -STOP 1; true")
    assert (await sandbox.run("echo alive")).stdout == b"alive\n"


async def test_without_programs_files_still_work(sandbox: Sandbox) -> None:
    """CASES 13: broken sandboxes say so."""
    await sandbox.files.write("/keep", b"1")
    await sandbox.run("rm -rf /bin /usr/bin")
    done = await sandbox.run("echo x")
    assert (done.outcome, done.exit_code) == ("not_found", 127)
    assert await sandbox.files.read("/keep") == b"1"
    assert {e.path for e in await sandbox.files.list("/")} >= {b"keep"}


async def test_a_shell_without_permission_is_a_result(sandbox: Sandbox) -> None:
    """CASES 13: broken sandboxes say so."""
    await sandbox.run("chmod 000 /bin/busybox")
    done = await sandbox.run("echo x", user="user")
    assert (done.outcome, done.exit_code) == ("not_executable", 126)


async def test_a_dead_sandbox_is_never_program_output(client: Client, sandbox: Sandbox) -> None:
    """CASES 13: broken sandboxes say so."""
    running = beside(sandbox.run, "echo begun; sleep 600")
    async with within(10):
        while not [p for p in await sandbox.processes() if b"600" in p.argv]:
            await pause()
    info = (await client.get(sandbox.id)).info
    os.kill(info.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(errors.SandboxUnavailable) as failed:
        await running
    assert time.monotonic() - began < 5
    assert failed.value.party == "sandbox" and "first process" in str(failed.value)
    with pytest.raises(errors.SandboxUnavailable):
        await sandbox.run("echo x")
    assert (await client.get(sandbox.id)).info.state in ("failing", "failed")
