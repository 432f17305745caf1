"""Terminals in sandboxes, by the SDK and by `barchan exec -it` on a terminal of ours."""

from __future__ import annotations

import asyncio
import sys

import pytest

from barchan import Client, Sandbox, TerminalProcess, errors
from tests.rig import within
from tests.server import Server
from tests.terminals import LocalTerminal


async def until(terminal: TerminalProcess, text: bytes) -> bytes:
    """Everything shown up to `text`."""
    seen = b""
    async with within(20):
        while text not in seen:
            chunk = await terminal.read()
            assert chunk, f"ended after {seen!r}"
            seen += chunk
    return seen


# --- the SDK


async def test_it_is_a_terminal(sandbox: Sandbox) -> None:
    line = "tty; test -t 0 && test -t 1 && test -t 2 && echo all; echo $TERM; readlink /proc/self/fd/0; exit 7"
    async with await sandbox.tty(["sh", "-c", line]) as terminal:
        shown = b"".join([chunk async for chunk in terminal])
        assert b"all\r\nxterm-256color\r\n/dev/pts/" in shown
        assert (await terminal.wait()).exit_code == 7
    async with await sandbox.tty("echo $TERM", env={"TERM": "dumb"}) as terminal:
        assert await until(terminal, b"\n") == b"dumb\r\n"


async def test_the_kind_that_the_sandbox_was_made_with(client: Client, tiny_env: str) -> None:
    async with (
        await client.create(tiny_env, env={"TERM": "vt100"}) as box,
        await box.tty("echo $TERM") as terminal,
    ):
        assert await until(terminal, b"\n") == b"vt100\r\n"
        assert (await box.run("echo $TERM")).text == "vt100\n"


async def test_a_shell_to_type_in(sandbox: Sandbox) -> None:
    async with await sandbox.tty(["sh"], rows=33, columns=101, cwd="/tmp", user="user") as terminal:
        await terminal.write("stty size 2>/dev/null || busybox stty size; pwd; id -u\n")
        shown = await until(terminal, b"1000\r\n")
        assert b"33 101\r\n/tmp\r\n" in shown
        await terminal.resize(50, 120)
        await terminal.write("busybox stty size\n")
        shown = await until(terminal, b"\r\n50 120\r\n")
        # An end of file that is typed before the shell edits its line again is lost when it changes the terminal's mode.
        if b"$ " not in shown.partition(b"\r\n50 120\r\n")[2]:
            await until(terminal, b"$ ")
        await terminal.write(b"\x04")
        assert (await terminal.wait()).exit_code == 0
        with pytest.raises(errors.ExecNotFound):
            await terminal.resize(1, 1)


async def test_ctrl_c_interrupts_what_runs_in_it(sandbox: Sandbox) -> None:
    async with await sandbox.tty(["sh"]) as terminal:
        await terminal.write("sh -c 'echo go; exec sleep 500'\n")
        await until(terminal, b"\r\ngo\r\n")
        await terminal.write(b"\x03")
        await terminal.write("echo a$?\n")
        await until(terminal, b"a130\r\n")
    assert (await terminal.wait()).outcome == "cancelled"
    assert [p.argv for p in await sandbox.processes() if p.pid != 1] == []


async def test_a_program_learns_of_a_new_size(sandbox: Sandbox) -> None:
    line = "trap 'busybox stty size' WINCH; echo ready; while :; do sleep 0.05; done"
    async with await sandbox.tty(["sh", "-c", line]) as terminal:
        await until(terminal, b"ready")
        for rows, columns in ((10, 20), (9999, 9998), (2, 5)):
            await terminal.resize(rows, columns)
            await until(terminal, b"%d %d\r\n" % (rows, columns))


async def test_the_end_of_input_is_ctrl_d(sandbox: Sandbox) -> None:
    async with await sandbox.tty(["cat"]) as terminal:
        await terminal.write("line\n")
        terminal.end_input()
        assert b"".join([chunk async for chunk in terminal]).endswith(b"line\r\nline\r\n")
        assert (await terminal.wait()).exit_code == 0


async def test_every_byte_passes_a_raw_terminal(sandbox: Sandbox) -> None:
    async with await sandbox.tty(["sh", "-c", "busybox stty raw -echo; echo ready; head -c 256"]) as terminal:
        await until(terminal, b"ready\n")
        await terminal.write(bytes(range(256)))
        assert b"".join([chunk async for chunk in terminal]) == bytes(range(256))


async def test_much_output(sandbox: Sandbox) -> None:
    async with await sandbox.tty("yes 0123456789 | head -n 100000") as terminal:
        assert b"".join([chunk async for chunk in terminal]) == b"0123456789\r\n" * 100_000


async def test_time_limits_hold_on_terminals(sandbox: Sandbox) -> None:
    async with await sandbox.tty("trap '' HUP TERM INT; sleep 501", timeout=0.5, grace=0.2) as terminal:
        assert (await terminal.wait()).outcome == "timed_out"


async def test_a_terminal_is_recorded(sandbox: Sandbox) -> None:
    async with await sandbox.tty(["sh", "-c", "read x; echo got $x"], id="typed") as terminal:
        await terminal.write("word\n")
        shown = b"".join([chunk async for chunk in terminal])
        assert shown == b"word\r\ngot word\r\n"
    again = await sandbox.attach("typed")
    assert await again.stdout.read_all() == shown


# --- the command line


def on_terminal(server: Server, *argv: str) -> LocalTerminal:
    words = [argv[0], "--data", str(server.data), *argv[1:]]
    return LocalTerminal([sys.executable, "-m", "barchan.cli.main", *words], rows=31, columns=99)


def work(terminal: LocalTerminal) -> None:
    """What one does in a shell: its size, a new size, ctrl-C, and leaving."""
    terminal.until(b"# ")
    terminal.type(b"busybox stty size\r")
    terminal.until(b"31 99")
    terminal.resize(40, 120)
    terminal.type(b"until busybox stty size | grep 40; do :; done\r")
    terminal.until(b"40 120")
    terminal.type(b"sh -c 'echo be''gun; exec sleep 600'\r")
    terminal.until(b"begun\r\n")
    terminal.type(b"\x03")
    terminal.type(b"echo code $?\r")
    terminal.until(b"code 130")
    terminal.type(b"exit 9\r")
    assert terminal.wait() == 9
    assert terminal.settings() == terminal.before


@pytest.mark.parametrize(
    ("ours", "options", "kind"),
    [("vt220", (), b"vt220"), ("", (), b"xterm-256color"), ("vt220", ("-e", "TERM=ansi"), b"ansi")],
    ids=["ours", "none of ours", "given"],
)
async def test_its_kind(
    server: Server,
    sandbox: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
    ours: str,
    options: tuple[str, ...],
    kind: bytes,
) -> None:
    monkeypatch.setenv("TERM", ours)
    with on_terminal(server, "exec", "-it", *options, sandbox.id, "sh", "-c", "echo is $TERM.") as terminal:
        await asyncio.to_thread(terminal.until, b"is " + kind + b".\r\n")
        assert await asyncio.to_thread(terminal.wait) == 0


async def test_exec_with_a_terminal(server: Server, sandbox: Sandbox) -> None:
    with on_terminal(server, "exec", "-it", sandbox.id) as terminal:
        await asyncio.to_thread(work, terminal)


async def test_shell(server: Server, sandbox: Sandbox) -> None:
    with on_terminal(server, "shell", sandbox.id, "-w", "/tmp", "-e", "X=given") as terminal:
        await asyncio.to_thread(terminal.until, b"# ")
        terminal.type(b"echo $PWD-$X\r")
        await asyncio.to_thread(terminal.until, b"/tmp-given")
        terminal.type(b"exit 9\r")
        assert await asyncio.to_thread(terminal.wait) == 9


async def test_shell_is_bash_where_there_is_one(server: Server, debian: Sandbox) -> None:
    with on_terminal(server, "shell", debian.id) as terminal:
        await asyncio.to_thread(terminal.until, b"# ")
        terminal.type(b"echo is ${BASH_VERSION:+bash}\r")
        await asyncio.to_thread(terminal.until, b"is bash")
        terminal.type(b"\x04")
        assert await asyncio.to_thread(terminal.wait) == 0


async def test_run_with_a_terminal(server: Server, tiny_env: str) -> None:
    with on_terminal(server, "run", "-it", "--memory", "128m", "--disk", "64m", tiny_env) as terminal:
        await asyncio.to_thread(work, terminal)


async def test_the_terminal_is_restored_when_we_are_killed_softly(server: Server, sandbox: Sandbox) -> None:
    with on_terminal(server, "exec", "-it", sandbox.id, "sh", "-c", "trap '' TERM; echo up; sleep 601") as terminal:
        await asyncio.to_thread(terminal.until, b"up\r\n")
        assert terminal.raw
        terminal.process.terminate()
        terminal.process.terminate()
        await asyncio.to_thread(terminal.wait)
        assert terminal.settings() == terminal.before
    assert [p.argv for p in await sandbox.processes() if p.pid != 1] == []
