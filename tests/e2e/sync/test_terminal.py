# Generated from tests/e2e/test_terminal.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""Terminals in sandboxes, by the SDK and by `barchan exec -it` on a terminal of ours."""

from __future__ import annotations

import pytest

from barchan import errors
from barchan.sync import Client, Sandbox, TerminalProcess
from tests.rig_sync import within


def until(terminal: TerminalProcess, text: bytes) -> bytes:
    """Everything shown up to `text`."""
    seen = b""
    with within(20):
        while text not in seen:
            chunk = terminal.read()
            assert chunk, f"ended after {seen!r}"
            seen += chunk
    return seen


# --- the SDK


def test_it_is_a_terminal(sandbox: Sandbox) -> None:
    line = "tty; test -t 0 && test -t 1 && test -t 2 && echo all; echo $TERM; readlink /proc/self/fd/0; exit 7"
    with sandbox.tty(["sh", "-c", line]) as terminal:
        shown = b"".join([chunk for chunk in terminal])
        assert b"all\r\nxterm-256color\r\n/dev/pts/" in shown
        assert terminal.wait().exit_code == 7
    with sandbox.tty("echo $TERM", env={"TERM": "dumb"}) as terminal:
        assert until(terminal, b"\n") == b"dumb\r\n"


def test_the_kind_that_the_sandbox_was_made_with(client: Client, tiny_env: str) -> None:
    with (
        client.create(tiny_env, env={"TERM": "vt100"}) as box,
        box.tty("echo $TERM") as terminal,
    ):
        assert until(terminal, b"\n") == b"vt100\r\n"
        assert box.run("echo $TERM").text == "vt100\n"


def test_a_shell_to_type_in(sandbox: Sandbox) -> None:
    with sandbox.tty(["sh"], rows=33, columns=101, cwd="/tmp", user="user") as terminal:
        terminal.write("stty size 2>/dev/null || busybox stty size; pwd; id -u\n")
        shown = until(terminal, b"1000\r\n")
        assert b"33 101\r\n/tmp\r\n" in shown
        terminal.resize(50, 120)
        terminal.write("busybox stty size\n")
        shown = until(terminal, b"\r\n50 120\r\n")
        # An end of file that is typed before the shell edits its line again is lost when it changes the terminal's mode.
        if b"$ " not in shown.partition(b"\r\n50 120\r\n")[2]:
            until(terminal, b"$ ")
        terminal.write(b"\x04")
        assert terminal.wait().exit_code == 0
        with pytest.raises(errors.ExecNotFound):
            terminal.resize(1, 1)


def test_ctrl_c_interrupts_what_runs_in_it(sandbox: Sandbox) -> None:
    with sandbox.tty(["sh"]) as terminal:
        terminal.write("sh -c 'echo go; exec sleep 500'\n")
        until(terminal, b"\r\ngo\r\n")
        terminal.write(b"\x03")
        terminal.write("echo a$?\n")
        until(terminal, b"a130\r\n")
    assert terminal.wait().outcome == "cancelled"
    assert [p.argv for p in sandbox.processes() if p.pid != 1] == []


def test_a_program_learns_of_a_new_size(sandbox: Sandbox) -> None:
    line = "trap 'busybox stty size' WINCH; echo ready; while :; do sleep 0.05; done"
    with sandbox.tty(["sh", "-c", line]) as terminal:
        until(terminal, b"ready")
        for rows, columns in ((10, 20), (9999, 9998), (2, 5)):
            terminal.resize(rows, columns)
            until(terminal, b"%d %d\r\n" % (rows, columns))


def test_the_end_of_input_is_ctrl_d(sandbox: Sandbox) -> None:
    with sandbox.tty(["cat"]) as terminal:
        terminal.write("line\n")
        terminal.end_input()
        assert b"".join([chunk for chunk in terminal]).endswith(b"line\r\nline\r\n")
        assert terminal.wait().exit_code == 0


def test_every_byte_passes_a_raw_terminal(sandbox: Sandbox) -> None:
    with sandbox.tty(["sh", "-c", "busybox stty raw -echo; echo ready; head -c 256"]) as terminal:
        until(terminal, b"ready\n")
        terminal.write(bytes(range(256)))
        assert b"".join([chunk for chunk in terminal]) == bytes(range(256))


def test_much_output(sandbox: Sandbox) -> None:
    with sandbox.tty("yes 0123456789 | head -n 100000") as terminal:
        assert b"".join([chunk for chunk in terminal]) == b"0123456789\r\n" * 100_000


def test_time_limits_hold_on_terminals(sandbox: Sandbox) -> None:
    with sandbox.tty("trap '' HUP TERM INT; sleep 501", timeout=0.5, grace=0.2) as terminal:
        assert terminal.wait().outcome == "timed_out"


def test_a_terminal_is_recorded(sandbox: Sandbox) -> None:
    with sandbox.tty(["sh", "-c", "read x; echo got $x"], id="typed") as terminal:
        terminal.write("word\n")
        shown = b"".join([chunk for chunk in terminal])
        assert shown == b"word\r\ngot word\r\n"
    again = sandbox.attach("typed")
    assert again.stdout.read_all() == shown
