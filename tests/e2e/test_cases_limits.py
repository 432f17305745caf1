"""Broken sandboxes say so and never look like program output; over-use is named, and the neighbours notice nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from barchan import Client, Limits, Sandbox, errors
from tests.e2e.conftest import SMALL

MIB = 1 << 20


@pytest.fixture
async def neighbour(client: Client, tiny_env: str) -> AsyncIterator[Sandbox]:
    """Another sandbox of the same node."""
    async with await client.create(tiny_env, limits=SMALL) as box:
        yield box


async def untouched(neighbour: Sandbox) -> bool:
    """Whether it runs commands, forks, writes and reads as if it were alone."""
    began = time.monotonic()
    script = "i=0; while [ $i -lt 20 ]; do true | cat; i=$((i+1)); done; head -c 4194304 /dev/urandom > /tmp/f; wc -c < /tmp/f"
    done = await neighbour.run(script)
    await neighbour.files.write("/tmp/g", b"x" * MIB)
    fine = await neighbour.files.read("/tmp/g") == b"x" * MIB
    return fine and done.limit is None and done.stdout == b"4194304\n" and time.monotonic() - began < 5


async def files_work(box: Sandbox, place: Path) -> bool:
    """Content, listings and trees, there and back."""
    (place / "tree/deep").mkdir(parents=True)
    (place / "tree/deep/file").write_bytes(b"\0\xff" * 5000)
    await box.files.upload(place / "tree", "/carried/over")
    await box.files.download("/carried", place / "back")
    return (
        (place / "back/over/deep/file").read_bytes() == b"\0\xff" * 5000
        and await box.files.read("/carried/over/deep/file", length=2) == b"\0\xff"
        and {entry.path for entry in await box.files.list("/carried", depth=3)}
        == {b"over", b"over/deep", b"over/deep/file"}
    )


# --- broken sandboxes

KILL_ALL_WAYS = """
import os
for number in range(1, 65):
    try:
        os.kill(1, number)
    except OSError:
        pass
for name, text in (("oom_score_adj", "1000"), ("mem", "x"), ("clear_refs", "5"), ("comm", "x"), ("setgroups", "deny")):
    try:
        open(f"/proc/1/{name}", "w").write(text)
    except OSError:
        pass
print("tried")
"""


@pytest.mark.parametrize("user", ["root", "nobody"])
async def test_the_first_process_survives_everything_inside(debian: Sandbox, user: str) -> None:
    """CASES 13: every signal, and its files in /proc, from root and from a user."""
    done = await debian.run(["python3", "-c", KILL_ALL_WAYS], user=user)
    assert done.stdout.endswith(b"tried\n"), done.stderr
    assert (await debian.run("sleep 600 & kill -9 -1; wait; echo alive", user=user)).stdout == b"alive\n"
    assert await debian.processes() == (), "a signal to all is one to all but it"
    assert (await debian.run("echo alive")).stdout == b"alive\n"


async def test_a_killed_first_process_is_told_to_everybody_within_seconds(
    client: Client, sandbox: Sandbox, neighbour: Sandbox
) -> None:
    """CASES 13: whoever waits and whoever comes later learns that the sandbox is unavailable, and why."""
    waiting = await sandbox.start("echo begun; sleep 600")
    assert await waiting.stdout.read() == b"begun\n"
    shell = sandbox.shell()
    await shell.open()
    os.kill((await client.get(sandbox.id)).info.pid, signal.SIGKILL)
    began = time.monotonic()
    for ask in (
        waiting.wait,
        lambda: sandbox.run("echo x"),
        lambda: sandbox.start("echo x"),
        lambda: sandbox.tty("sh"),
        lambda: shell.run("echo x"),
        lambda: sandbox.files.read("/etc/passwd"),
        lambda: sandbox.files.write("/tmp/x", b"x"),
        sandbox.processes,
    ):
        with pytest.raises(errors.SandboxUnavailable, match="first process") as failed:
            await ask()
        assert failed.value.party == "sandbox"
    assert time.monotonic() - began < 5
    info = (await client.get(sandbox.id)).info
    assert info.state in ("failing", "failed") and "first process" in info.reason
    assert await untouched(neighbour)


async def test_without_any_program_files_still_come_and_go(debian: Sandbox, tmp_path: Path) -> None:
    """CASES 13: /bin and all libraries deleted: a typed outcome without output, and transfer works."""
    await debian.run("rm -rf /bin /sbin /usr /lib /lib64", timeout=60)
    for command in ("echo x", ["echo", "x"], ["/usr/bin/python3", "-c", "print(1)"]):
        done = await debian.run(command)
        assert (done.outcome, done.exit_code, done.stdout, done.stderr) == ("not_found", 127, b"", b"")
    with pytest.raises(errors.ShellEnded, match="not found"):
        await debian.shell().open()
    assert await files_work(debian, tmp_path)
    assert await debian.processes() == ()


@pytest.mark.parametrize("user", ["root", "nobody"])
async def test_a_shell_that_may_not_be_run(debian: Sandbox, tmp_path: Path, user: str) -> None:
    """CASES 13: chmod 000 /bin/sh: not executable, for root too; other programs and files work."""
    await debian.run("chmod 000 $(readlink -f /bin/sh)")
    done = await debian.run("echo x", user=user)
    assert (done.outcome, done.exit_code, done.stdout, done.stderr) == ("not_executable", 126, b"", b"")
    assert (await debian.run(["echo", "x"], user=user)).stdout == b"x\n"
    assert await files_work(debian, tmp_path)


FILL = """
import os, signal, time
pids = 0
try:
    while True:
        if os.fork() == 0:
            signal.pause()
        pids += 1
except OSError as error:
    print(pids, error.errno, flush=True)
signal.pause()
"""


async def test_a_process_table_filled_from_inside(
    client: Client, debian_env: str, neighbour: Sandbox, tmp_path: Path
) -> None:
    """CASES 13: commands are refused as unavailable within seconds, with the reason; files work; ending it heals."""
    async with await client.create(debian_env, limits=Limits(pids=40, memory=256 * MIB)) as box:
        filling = await box.start(["python3", "-c", FILL])
        count, number = (await filling.stdout.read()).split()
        assert int(count) >= 30 and int(number) == 11
        began = time.monotonic()
        for ask in (lambda: box.run("echo x"), lambda: box.start(["true"]), lambda: box.tty("sh")):
            with pytest.raises(errors.SandboxUnavailable, match="process"):
                await ask()
        assert time.monotonic() - began < 5
        assert await files_work(box, tmp_path)
        assert len(await box.processes()) >= int(count)
        assert await untouched(neighbour)
        await filling.cancel()
        assert (await filling.wait()).limit in (None, "pids")
        assert (await box.run("echo alive")).stdout == b"alive\n"


# --- over-use

EAT = {
    "one": "a = bytearray(400 << 20)",
    "shared": "import mmap\nm = mmap.mmap(-1, 400 << 20)\nfor i in range(0, 400 << 20, 4096): m[i] = 1",
}


@pytest.mark.parametrize("how", ["one", "shared"])
async def test_too_much_memory_is_oom(client: Client, debian_env: str, neighbour: Sandbox, how: str) -> None:
    """CASES 14: over-use is named."""
    async with await client.create(debian_env, limits=Limits(memory=64 * MIB)) as box:
        eating = await box.start(["python3", "-c", EAT[how]])
        assert await untouched(neighbour)
        result = await eating.wait()
        assert (result.limit, result.exit_code, result.signal) == ("oom", 137, 9)
        assert (await box.run("echo alive")).stdout == b"alive\n"
        assert (await box.run("exit 137")).limit is None, "only when it was"


BOMB = "f() { f | f & }; (f &); exec sleep 600"


async def test_a_fork_bomb_is_pids(client: Client, tiny_env: str, neighbour: Sandbox) -> None:
    """CASES 14: named although its end is a time-out; the sandbox is usable as soon as that is over."""
    async with await client.create(tiny_env, limits=Limits(pids=100, memory=256 * MIB)) as box:
        bomb = await box.start(BOMB, timeout=4, grace=0)
        assert await untouched(neighbour)
        result = await bomb.wait()
        assert (result.outcome, result.limit) == ("timed_out", "pids")
        assert await box.processes() == ()
        assert (await box.run("echo alive")).stdout == b"alive\n"


MANY_FILES = "i=0; while head -c 100000 /dev/urandom > /tmp/f$i; do i=$((i+1)); done; exit 3"


@pytest.mark.parametrize("script", ["cat /dev/urandom > /tmp/big", MANY_FILES], ids=["one file", "many files"])
async def test_a_full_disk_is_disk_full(
    client: Client, tiny_env: str, neighbour: Sandbox, tmp_path: Path, script: str
) -> None:
    """CASES 14: for commands, file writes and uploads; the neighbour has its own disk, and room made inside is room."""
    async with await client.create(tiny_env, limits=Limits(disk=32 * MIB)) as box:
        done = await box.run(script, timeout=60)
        assert done.exit_code != 0 and done.limit == "disk_full"
        with pytest.raises(errors.SandboxDiskFull):
            await box.files.write("/more", os.urandom(8 * MIB))
        (tmp_path / "blob").write_bytes(os.urandom(8 * MIB))
        with pytest.raises(errors.SandboxDiskFull):
            await box.files.upload(tmp_path / "blob", "/other")
        assert not await box.files.exists("/more") and not await box.files.exists("/other")
        assert await untouched(neighbour)
        assert (await box.run("rm -f /tmp/*; echo alive")).stdout == b"alive\n"
        await box.files.write("/more", os.urandom(4 * MIB))


OPEN_ALONE = """
import os
for i in range(100_000):
    os.open("/etc/passwd", os.O_RDONLY)
    os.write(1, b"x")
"""
OPEN = """
import os, signal, sys
wanted, each = int(sys.argv[1]), int(sys.argv[2])
done, children = os.pipe(), 0
while children * each < wanted:
    children += 1
    if os.fork() == 0:
        for i in range(each):
            os.open("/etc/passwd", os.O_RDONLY)
        os.write(done[1], b"x")
        signal.pause()
for i in range(children):
    os.read(done[0], 1)
print(children * each, flush=True)
signal.pause()
"""


async def test_a_hundred_thousand_open_files(client: Client, debian_env: str, neighbour: Sandbox) -> None:
    """CASES 14: one program stops at its own limit; many may hold as many as their memory has room for."""
    async with await client.create(debian_env, limits=Limits(files=2000, pids=200, memory=512 * MIB)) as box:
        one = await box.run(["python3", "-c", OPEN_ALONE])
        assert one.exit_code == 1 and b"Too many open files" in one.stderr and len(one.stdout) > 1900
        many = await box.start(["python3", "-c", OPEN, "100000", "1000"], timeout=60)
        assert await many.stdout.read() == b"100000\n"
        assert await untouched(neighbour)
        assert (await box.run("cat /etc/hostname; echo alive")).stdout.endswith(b"alive\n")
        await many.cancel()
        assert (await many.wait()).outcome == "cancelled"
