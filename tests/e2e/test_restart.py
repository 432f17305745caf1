"""kill -9 of the node agent, the API and the spawner: programs go on, nothing is lost, nothing is told twice."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from barchan import Client, Sandbox, TerminalProcess, errors
from barchan.kernel import processes
from tests.e2e.conftest import make_tiny
from tests.rig import aside, pause, within
from tests.server import PLACE, Server, remove, shared_server


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of this module's own, since it is going to be killed."""
    shared_server()
    data = Path(os.environ[PLACE] + "-restart")
    server = Server(data)
    try:
        server.run("up", "-d", "--name", "restart", "--scratch-bytes", "512m")
        server.run("env", "import", "tiny", str(make_tiny(tmp_path_factory.mktemp("tiny"))))
        yield server
    finally:
        remove(data)


@pytest.fixture
async def client(own: Server) -> AsyncIterator[Client]:
    async with Client(data=own.data) as client:
        yield client


@pytest.fixture
async def sandbox(client: Client) -> AsyncIterator[Sandbox]:
    async with await client.create("tiny") as sandbox:
        yield sandbox


def process_of(server: Server, service: str) -> int:
    """Pid of the server's `api` or `node` process."""
    state = json.loads((server.data / "run" / "up.json").read_text())
    return int(state["services"][service]["pid"])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill(server: Server, service: str) -> int:
    """kill -9, and wait until it is gone. Returns its pid."""
    pid = process_of(server, service)
    fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_gone(fd)
    return pid


def wait_gone(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(10_000)
    os.close(fd)


def start_time(pid: int) -> bytes:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return stat[stat.rindex(b")") + 2 :].split()[19]


COUNT = "i=0; while [ $i -lt 4000 ]; do echo line $i; i=$((i+1)); [ $((i % 40)) = 0 ] && sleep 0.02; done; exit 7"
EXPECTED = b"".join(b"line %d\n" % i for i in range(4000))


async def test_a_program_outlives_the_agent_without_a_gap(own: Server, client: Client, sandbox: Sandbox) -> None:
    """CASES 5: killed processes leave nothing."""
    before = (await client.get(sandbox.id)).info
    started = start_time(before.pid)
    process = await sandbox.start(COUNT)
    seen = bytearray()
    kills = 0
    async for chunk in process.stdout:
        seen += chunk
        if len(seen) > len(EXPECTED) * (kills + 1) // 4 and kills < 2:
            kill(own, "node")
            kills += 1
    result = await process.wait()
    assert kills == 2
    assert bytes(seen) == EXPECTED
    assert (result.outcome, result.exit_code) == ("exited", 7)
    after = (await client.get(sandbox.id)).info
    assert after.pid == before.pid and start_time(after.pid) == started, "the same first process"
    again = await sandbox.attach(process.id)
    assert b"".join([chunk async for chunk in again.stdout]) == EXPECTED, "the log holds it once, whole"
    assert await again.wait() == result
    history = [e for e in await sandbox.execs() if e.id == process.id]
    assert len(history) == 1 and history[0].result == result


async def test_an_end_while_the_agent_is_away_is_not_missed(own: Server, sandbox: Sandbox) -> None:
    process = await sandbox.start("echo begun; read x < /tmp/go; echo done; exit 5; ", stdin=False)
    await sandbox.run(["true"])
    pid = process_of(own, "node")
    quick = await sandbox.start("sleep 0.3; echo finished")
    await aside(kill, own, "node")
    result = await quick.wait()
    assert result.exit_code == 0 and result.stdout_bytes == len("finished\n")
    assert process_of(own, "node") != pid
    assert (await process.wait()).exit_code == 5


async def test_input_goes_on_after_the_agent_was_killed(own: Server, sandbox: Sandbox) -> None:
    process = await sandbox.start(["sha256sum"], stdin=True)
    blob = os.urandom(1 << 20)
    for i in range(24):
        await process.stdin.write(blob)
        if i == 8:
            await aside(kill, own, "node")
    process.stdin.close()
    digest = b"".join([chunk async for chunk in process.stdout]).split()[0]
    assert digest.decode() == hashlib.sha256(blob * 24).hexdigest()
    assert (await process.wait()).exit_code == 0


async def test_a_command_never_runs_twice(own: Server, sandbox: Sandbox) -> None:
    """A caller that never heard the answer sends the same id again."""
    await sandbox.run("echo x >> /tmp/count", id="once-and-only")
    await aside(kill, own, "node")
    again = await sandbox.run("echo x >> /tmp/count", id="once-and-only")
    assert again.exit_code == 0
    assert await sandbox.files.read("/tmp/count") == b"x\n"
    with pytest.raises(errors.Conflict):
        await sandbox.run("echo y", id="once-and-only")


async def test_the_api_may_die_at_any_time(own: Server, sandbox: Sandbox) -> None:
    """CASES 5: killed processes leave nothing."""
    process = await sandbox.start(COUNT)
    seen = bytearray()
    killed = False
    async for chunk in process.stdout:
        seen += chunk
        if len(seen) > len(EXPECTED) // 2 and not killed:
            killed = True
            kill(own, "api")
    assert bytes(seen) == EXPECTED and (await process.wait()).exit_code == 7


async def test_a_shell_session_outlives_the_agent(own: Server, sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        await shell.run("cd /tmp; X=kept")
        pid = (await shell.run("echo $$", id="pid")).stdout
        await aside(kill, own, "node")
        assert (await shell.run("pwd; echo $X $$")).stdout == b"/tmp\nkept " + pid
        process = await shell.start("echo before; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo after; exit 3")
        assert await process.stdout.read() == b"before\n"
        await aside(kill, own, "node")
        assert await shell_is_busy(sandbox, shell.id), "the command was taken up, not started again"
        await sandbox.files.write("/tmp/go", b"")
        assert await process.stdout.read_all() == b"after\n"
        assert (await process.wait()).exit_code == 3
        with pytest.raises(errors.ShellEnded, match="exit code 3"):
            await shell.run("pwd")
        await aside(kill, own, "node")
        with pytest.raises(errors.ShellEnded, match="exit code 3"):
            await shell.run("pwd")
        assert (await shell.run("echo $$", id="pid")).stdout == pid, "what is recorded stays"


async def shell_is_busy(sandbox: Sandbox, id: str) -> bool:
    try:
        await sandbox.shell(id=id).run("true")
    except errors.ShellBusy:
        return True
    return False


async def test_a_terminal_outlives_the_agent(own: Server, sandbox: Sandbox) -> None:
    async with await sandbox.tty(["sh"]) as terminal:
        await terminal.write("echo a$((1 + 1))\n")
        await shown(terminal, b"a2\r\n")
        await aside(kill, own, "node")
        await terminal.write("echo b$((2 + 2))\n")
        await shown(terminal, b"b4\r\n")
        await terminal.resize(50, 120)
        await terminal.write("busybox stty size\n")
        await shown(terminal, b"50 120\r\n")
        await terminal.write("exit 5\n")
        assert (await terminal.wait()).exit_code == 5


async def shown(terminal: TerminalProcess, text: bytes) -> None:
    seen = b""
    async with within(30):
        while text not in seen:
            chunk = await terminal.read()
            assert chunk, f"ended after {seen!r}"
            seen += chunk


# --- the platform alone


async def test_the_spawner_may_die(own: Server, client: Client, sandbox: Sandbox) -> None:
    """CASES 5: killed processes leave nothing."""
    agent = process_of(own, "node")
    spawner = next(pid for pid in children(agent) if b"spawner" in Path(f"/proc/{pid}/cmdline").read_bytes())
    fd = os.pidfd_open(spawner)
    os.kill(spawner, signal.SIGKILL)
    wait_gone(fd)
    assert (await sandbox.run("echo alive")).stdout == b"alive\n"
    async with await client.create("tiny") as other:
        assert (await other.run("echo new")).stdout == b"new\n"


async def test_a_restarted_agent_mounts_no_layer_twice(own: Server, client: Client, sandbox: Sandbox) -> None:
    device = await device_of_base(sandbox, own)
    await aside(kill, own, "node")
    async with await client.create("tiny") as other:
        assert await device_of_base(other, own) == device
    layers = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{own.data}/mnt/" in line]
    assert len(layers) == 1


async def device_of_base(sandbox: Sandbox, server: Server) -> set[int]:
    assert (await sandbox.run(["true"])).exit_code == 0
    return {os.stat(path).st_dev for path in (server.data / "mnt").iterdir() if path.is_dir()}


async def test_leftovers_of_unknown_sandboxes_are_swept(own: Server, client: Client) -> None:
    """CASES 5: Everything of a sandbox that the registry does not know goes when an agent starts, its processes first."""
    box = await client.create("tiny")
    pid = box.info.pid
    agent = process_of(own, "node")
    os.kill(agent, signal.SIGSTOP)
    forget(own.data / "node.db", box.id)
    kill(own, "node")
    async with within(20):
        while processes.start_time(pid) or (own.data / "scratch" / box.id).exists():
            await pause()
    with pytest.raises(errors.SandboxNotFound):
        await client.get(box.id)


def forget(database: Path, id: str) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("DELETE FROM sandboxes WHERE id = ?", (id,))
    connection.close()


async def test_lifetimes_hold(client: Client) -> None:
    """CASES 5: killed processes leave nothing."""
    idle = await client.create("tiny", idle_timeout=1)
    short = await client.create("tiny", lifetime=1)
    began = time.monotonic()
    for box, why in ((idle, "idle"), (short, "lifetime")):
        async with within(8):
            while (await client.get(box.id)).info.state not in ("stopped",):
                await pause()
        assert why in (await client.get(box.id)).info.reason
    assert time.monotonic() - began < 1 + 5 + 2


def test_down_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """CASES 5: After `down` there is no process, mount, loop device, cgroup or socket of it."""
    shared_server()
    data = Path(os.environ[PLACE] + "-down")
    server = Server(data)
    try:
        server.run("up", "-d", "--name", "down", "--scratch-bytes", "256m")
        server.run("env", "import", "tiny", str(make_tiny(tmp_path_factory.mktemp("tiny"))))
        made = server.run("create", "tiny")
        instance = (data / "instance").read_text().strip()
        pid = made["pid"]
        assert processes.start_time(pid)
        assert groups(instance)
        server.run("down")
        assert not processes.start_time(pid)
        assert str(data) not in Path("/proc/self/mountinfo").read_text()
        assert not [p for p in Path("/sys/block").glob("loop*/loop/backing_file") if str(data) in p.read_text()]
        assert not groups(instance)
        assert not list((data / "run").glob("*.sock"))
    finally:
        remove(data)


def groups(instance: str) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").rglob(f"barchan-{instance}") if path.is_dir()]


async def test_a_sandbox_that_ended_before_a_restart_can_still_be_read(own: Server, client: Client) -> None:
    sandbox = await client.create("tiny")
    await sandbox.run("echo kept; exit 5", id="a")
    await sandbox.stop()
    kill(own, "node")
    async with within(30):
        found = await client.get(sandbox.id)
        assert [(e.id, e.result and e.result.exit_code) for e in await found.execs()] == [("a", 5)]
        again = await found.attach("a")
        assert await again.stdout.read_all() == b"kept\n"
        assert (await again.wait()).exit_code == 5
