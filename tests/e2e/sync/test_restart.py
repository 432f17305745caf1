# Generated from tests/e2e/test_restart.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""kill -9 of the node agent, the API and the spawner: programs go on, nothing is lost, nothing is told twice."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan import errors
from barchan.sync import Client, Sandbox, TerminalProcess
from tests.e2e.conftest import make_tiny
from tests.rig_sync import aside, within
from tests.server import PLACE, Server, remove, shared_server


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of this module's own, since it is going to be killed."""
    shared_server()
    data = Path(os.environ[PLACE] + "-sync-restart")
    server = Server(data)
    try:
        server.run("up", "-d", "--name", "restart", "--scratch-bytes", "512m")
        server.run("env", "import", "tiny", str(make_tiny(tmp_path_factory.mktemp("tiny"))))
        yield server
    finally:
        remove(data)


@pytest.fixture
def client(own: Server) -> Iterator[Client]:
    with Client(data=own.data) as client:
        yield client


@pytest.fixture
def sandbox(client: Client) -> Iterator[Sandbox]:
    with client.create("tiny") as sandbox:
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


def test_a_program_outlives_the_agent_without_a_gap(own: Server, client: Client, sandbox: Sandbox) -> None:
    """CASES 5: killed processes leave nothing."""
    before = client.get(sandbox.id).info
    started = start_time(before.pid)
    process = sandbox.start(COUNT)
    seen = bytearray()
    kills = 0
    for chunk in process.stdout:
        seen += chunk
        if len(seen) > len(EXPECTED) * (kills + 1) // 4 and kills < 2:
            kill(own, "node")
            kills += 1
    result = process.wait()
    assert kills == 2
    assert bytes(seen) == EXPECTED
    assert (result.outcome, result.exit_code) == ("exited", 7)
    after = client.get(sandbox.id).info
    assert after.pid == before.pid and start_time(after.pid) == started, "the same first process"
    again = sandbox.attach(process.id)
    assert b"".join([chunk for chunk in again.stdout]) == EXPECTED, "the log holds it once, whole"
    assert again.wait() == result
    history = [e for e in sandbox.execs() if e.id == process.id]
    assert len(history) == 1 and history[0].result == result


def test_an_end_while_the_agent_is_away_is_not_missed(own: Server, sandbox: Sandbox) -> None:
    process = sandbox.start("echo begun; read x < /tmp/go; echo done; exit 5; ", stdin=False)
    sandbox.run(["true"])
    pid = process_of(own, "node")
    quick = sandbox.start("sleep 0.3; echo finished")
    aside(kill, own, "node")
    result = quick.wait()
    assert result.exit_code == 0 and result.stdout_bytes == len("finished\n")
    assert process_of(own, "node") != pid
    assert process.wait().exit_code == 5


def test_input_goes_on_after_the_agent_was_killed(own: Server, sandbox: Sandbox) -> None:
    process = sandbox.start(["sha256sum"], stdin=True)
    blob = os.urandom(1 << 20)
    for i in range(24):
        process.stdin.write(blob)
        if i == 8:
            aside(kill, own, "node")
    process.stdin.close()
    digest = b"".join([chunk for chunk in process.stdout]).split()[0]
    assert digest.decode() == hashlib.sha256(blob * 24).hexdigest()
    assert process.wait().exit_code == 0


def test_a_command_never_runs_twice(own: Server, sandbox: Sandbox) -> None:
    """A caller that never heard the answer sends the same id again."""
    sandbox.run("echo x >> /tmp/count", id="once-and-only")
    aside(kill, own, "node")
    again = sandbox.run("echo x >> /tmp/count", id="once-and-only")
    assert again.exit_code == 0
    assert sandbox.files.read("/tmp/count") == b"x\n"
    with pytest.raises(errors.Conflict):
        sandbox.run("echo y", id="once-and-only")


def test_the_api_may_die_at_any_time(own: Server, sandbox: Sandbox) -> None:
    """CASES 5: killed processes leave nothing."""
    process = sandbox.start(COUNT)
    seen = bytearray()
    killed = False
    for chunk in process.stdout:
        seen += chunk
        if len(seen) > len(EXPECTED) // 2 and not killed:
            killed = True
            kill(own, "api")
    assert bytes(seen) == EXPECTED and process.wait().exit_code == 7


def test_a_shell_session_outlives_the_agent(own: Server, sandbox: Sandbox) -> None:
    with sandbox.shell() as shell:
        shell.run("cd /tmp; X=kept")
        pid = shell.run("echo $$", id="pid").stdout
        aside(kill, own, "node")
        assert shell.run("pwd; echo $X $$").stdout == b"/tmp\nkept " + pid
        process = shell.start("echo before; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo after; exit 3")
        assert process.stdout.read() == b"before\n"
        aside(kill, own, "node")
        assert shell_is_busy(sandbox, shell.id), "the command was taken up, not started again"
        sandbox.files.write("/tmp/go", b"")
        assert process.stdout.read_all() == b"after\n"
        assert process.wait().exit_code == 3
        with pytest.raises(errors.ShellEnded, match="exit code 3"):
            shell.run("pwd")
        aside(kill, own, "node")
        with pytest.raises(errors.ShellEnded, match="exit code 3"):
            shell.run("pwd")
        assert shell.run("echo $$", id="pid").stdout == pid, "what is recorded stays"


def shell_is_busy(sandbox: Sandbox, id: str) -> bool:
    try:
        sandbox.shell(id=id).run("true")
    except errors.ShellBusy:
        return True
    return False


def test_a_terminal_outlives_the_agent(own: Server, sandbox: Sandbox) -> None:
    with sandbox.tty(["sh"]) as terminal:
        terminal.write("echo a$((1 + 1))\n")
        shown(terminal, b"a2\r\n")
        aside(kill, own, "node")
        terminal.write("echo b$((2 + 2))\n")
        shown(terminal, b"b4\r\n")
        terminal.resize(50, 120)
        terminal.write("busybox stty size\n")
        shown(terminal, b"50 120\r\n")
        terminal.write("exit 5\n")
        assert terminal.wait().exit_code == 5


def shown(terminal: TerminalProcess, text: bytes) -> None:
    seen = b""
    with within(30):
        while text not in seen:
            chunk = terminal.read()
            assert chunk, f"ended after {seen!r}"
            seen += chunk
