# Generated from tests/e2e/test_limits.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""Over-use is answered by name, the host and the neighbours stay untouched, and a broken sandbox says so."""

from __future__ import annotations

import os
import signal
import time

import pytest

from barchan import errors
from barchan.sizes import size
from barchan.sync import Client, Limits, Sandbox
from tests.rig_sync import beside, pause, within

MIB = 1 << 20
EAT = "a=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#a}"
"""A shell that grows to some 400 MB."""


def test_a_limit_is_told_of_the_command_that_met_it(client: Client, tiny_env: str) -> None:
    """A kill that a command survives is no reason for the failure of the next."""
    with client.create(tiny_env, limits=Limits(memory=32 * MIB)) as sandbox:
        met = sandbox.run("sh -c 'x=a; while :; do x=$x$x; done'; exit 0")
        assert met.exit_code == 0 and sandbox.stats().oom_kills > 0
        assert sandbox.run("exit 3").limit is None


def test_oom_is_named(client: Client, tiny_env: str) -> None:
    """CASES 14: over-use is named."""
    with client.create(tiny_env, limits=Limits(memory=64 * MIB)) as box:
        done = box.run(EAT)
        assert (done.limit, done.exit_code) == ("oom", 137)
        assert box.run("echo alive").stdout == b"alive\n", "its first process was spared"


def test_a_full_process_table_stops_commands_but_not_files(client: Client, tiny_env: str) -> None:
    """CASES 13: broken sandboxes say so."""
    with client.create(tiny_env, limits=Limits(pids=16)) as box:
        sleepers = []
        with pytest.raises(errors.SandboxUnavailable, match="process"):
            for _ in range(20):
                sleepers.append(box.start(["sleep", "600"]))
        assert len(sleepers) >= 12
        box.files.write("/tmp/still", b"works")
        assert box.files.read("/tmp/still") == b"works"
        assert len(box.processes()) >= len(sleepers)
        sleepers[0].cancel()
        sleepers[0].wait()
        assert box.run(["echo", "alive"]).stdout == b"alive\n"


def test_disk_full_is_named(client: Client, tiny_env: str) -> None:
    """CASES 14: over-use is named."""
    with client.create(tiny_env, limits=Limits(disk=16 * MIB)) as box:
        done = box.run("dd if=/dev/urandom of=/big bs=1M count=64")
        assert (done.limit, done.exit_code) == ("disk_full", 1)
        with pytest.raises(errors.SandboxDiskFull):
            box.files.write("/more", os.urandom(4 * MIB))
        assert box.run("rm /big; echo alive").stdout == b"alive\n"


def test_open_files_are_limited(client: Client, tiny_env: str) -> None:
    """CASES 14: over-use is named."""
    with client.create(tiny_env, limits=Limits(files=128)) as box:
        assert box.run("ulimit -n").stdout == b"128\n"


def test_limits_do_not_add_up(client: Client, tiny_env: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="ever") as refused:
        client.create(tiny_env, limits=Limits(memory=1 << 50))
    assert refused.value.field == "limits.memory" and not refused.value.retry
    assert size(client.nodes()[0].memory_total) in refused.value.hint


# --- a sandbox that is broken from inside or outside


def test_the_first_process_cannot_be_killed_from_inside(sandbox: Sandbox) -> None:
    """CASES 13: broken sandboxes say so."""
    sandbox.run("kill -9 1; kill -15 1; kill -STOP 1; true")
    assert sandbox.run("echo alive").stdout == b"alive\n"


def test_without_programs_files_still_work(sandbox: Sandbox) -> None:
    """CASES 13: broken sandboxes say so."""
    sandbox.files.write("/keep", b"1")
    sandbox.run("rm -rf /bin /usr/bin")
    done = sandbox.run("echo x")
    assert (done.outcome, done.exit_code) == ("not_found", 127)
    assert sandbox.files.read("/keep") == b"1"
    assert {e.path for e in sandbox.files.list("/")} >= {b"keep"}


def test_a_shell_without_permission_is_a_result(sandbox: Sandbox) -> None:
    """CASES 13: broken sandboxes say so."""
    sandbox.run("chmod 000 /bin/busybox")
    done = sandbox.run("echo x", user="user")
    assert (done.outcome, done.exit_code) == ("not_executable", 126)


def test_a_dead_sandbox_is_never_program_output(client: Client, sandbox: Sandbox) -> None:
    """CASES 13: broken sandboxes say so."""
    running = beside(sandbox.run, "echo begun; sleep 600")
    with within(10):
        while not [p for p in sandbox.processes() if b"600" in p.argv]:
            pause()
    info = client.get(sandbox.id).info
    os.kill(info.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(errors.SandboxUnavailable) as failed:
        running.wait()
    assert time.monotonic() - began < 5
    assert failed.value.party == "sandbox" and "first process" in str(failed.value)
    with pytest.raises(errors.SandboxUnavailable):
        sandbox.run("echo x")
    assert client.get(sandbox.id).info.state in ("failing", "failed")
