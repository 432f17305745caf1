"""Terminals of the real guest: what a program on one sees, and what the host can do to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from barchan.wire.frames import FrameType, encode, encode_data, encode_eof
from barchan.wire.guest import ExecFlag, GuestOutcome, OpKind, resize, signal
from tests.host.guest_client import Guest, Link, Result, exec_parts

TTY, STDIN = ExecFlag.TTY, ExecFlag.STDIN


def on_terminal(
    guest: Guest, link: Link, script: str, *, flags: int = TTY | STDIN, rows: int = 24, columns: int = 80
) -> tuple[int, Result]:
    op = guest.next_op()
    return op, link.start(op, OpKind.EXEC, exec_parts("sh", "-c", script, flags=flags, rows=rows, columns=columns))


def type_in(link: Link, op: int, at: int, text: bytes) -> int:
    link.send(encode_data(op, 0, at, text))
    return at + len(text)


def shown(link: Link, result: Result, text: bytes) -> None:
    link.until(lambda: text in result.stdout or result.done)
    assert text in result.stdout


def test_the_program_has_a_terminal_of_its_own(guest: Guest, link: Link) -> None:
    script = "test -t 0 && test -t 1 && test -t 2 && stat -c '%u %a' $(tty) && stty size; echo x > /dev/tty; echo $(cut -d' ' -f8 /proc/$$/stat) $$"
    op, result = on_terminal(guest, link, script, rows=41, columns=123)
    done = link.wait(op)
    assert (done.outcome, done.code) == (GuestOutcome.EXITED, 0)
    *lines, last = result.stdout.split(b"\r\n")[:-1]
    assert lines == [b"0 620", b"41 123", b"x"]
    foreground, pid = last.split()
    assert foreground and pid == str(result.started).encode()
    assert result.eof == {1: (len(result.stdout), 0), 2: (0, 0)}


def test_input_is_echoed_and_cooked(guest: Guest, link: Link) -> None:
    op, result = on_terminal(guest, link, "read a; echo got-$a")
    type_in(link, op, 0, b"wrang\x7fong\n")
    link.wait(op)
    assert b"got-wranong\r\n" in result.stdout and b"\b \b" in result.stdout


def test_an_interrupt_character_reaches_the_foreground(guest: Guest, link: Link) -> None:
    op, result = on_terminal(
        guest, link, "trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 60 & wait; done"
    )
    shown(link, result, b"ready")
    type_in(link, op, 0, b"\x03")
    assert link.wait(op).code == 7
    assert b"caught" in result.stdout


def test_resize_signals_the_program(guest: Guest, link: Link) -> None:
    script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 60 & wait; done"
    op, result = on_terminal(guest, link, script)
    shown(link, result, b"ready")
    link.send(resize(op, 50, 132))
    assert link.wait(op).code == 0
    assert result.stdout.endswith(b"50 132\r\n")


def test_resize_of_what_has_no_terminal_is_ignored(guest: Guest, link: Link) -> None:
    op = guest.next_op()
    link.start(op, OpKind.EXEC, exec_parts("sleep", "60"))
    link.send(resize(op, 50, 132) + resize(op + 1000, 1, 1) + encode(FrameType.CANCEL, op))
    assert link.wait(op).outcome == GuestOutcome.CANCELLED
    link.send(resize(op, 1, 1))
    link.ping()


@pytest.mark.parametrize("typed", [b"", b"one\n", b"half a line"])
def test_end_of_input_ends_a_reader(guest: Guest, link: Link, typed: bytes) -> None:
    op, result = on_terminal(guest, link, "cat >/dev/null; echo over")
    link.send(encode_data(op, 0, 0, typed) + encode_eof(op, 0, len(typed)))
    assert link.wait(op).code == 0
    assert result.stdout.endswith(b"over\r\n")


def test_a_raw_terminal_gets_no_character_at_the_end_of_input(guest: Guest, link: Link) -> None:
    op, result = on_terminal(guest, link, "stty raw -echo; echo ready; head -c 3 | od -An -tx1; sleep 60")
    shown(link, result, b"ready")
    link.send(encode_data(op, 0, 0, b"ab\x04") + encode_eof(op, 0, 3))
    shown(link, result, b"61 62 04")
    link.send(encode(FrameType.CANCEL, op))
    link.wait(op)


def test_without_input_a_reader_sees_the_end_at_once(guest: Guest, link: Link) -> None:
    op, result = on_terminal(guest, link, "cat; echo over", flags=TTY)
    assert link.wait(op).code == 0
    assert result.stdout == b"over\r\n"


def test_all_output_arrives_however_much(guest: Guest, link: Link) -> None:
    op, result = on_terminal(guest, link, "stty -opost; seq 100000")
    link.wait(op)
    assert result.stdout == b"".join(b"%d\n" % i for i in range(1, 100001))


def test_the_end_hangs_up_on_what_is_left(guest: Guest, link: Link, tmp_path: Path) -> None:
    mark = tmp_path / "hung-up"
    script = f"(trap 'echo > {mark}; exit' HUP; echo set; while :; do sleep 60 & wait; done) & read go"
    op, result = on_terminal(guest, link, script)
    shown(link, result, b"set")
    type_in(link, op, 0, b"\n")
    assert link.wait(op).outcome == GuestOutcome.EXITED
    while not mark.exists():
        link.ping()


def test_a_program_that_closes_its_terminal_may_open_it_again(guest: Guest, link: Link) -> None:
    op, result = on_terminal(guest, link, "exec <&- >&- 2>&-; sleep 0.1; exec >/dev/tty; echo back")
    link.wait(op)
    assert result.stdout == b"back\r\n"


def test_time_out_ends_a_program_on_a_terminal(guest: Guest, link: Link) -> None:
    op = guest.next_op()
    link.start(
        op, OpKind.EXEC, exec_parts("sh", "-c", "trap '' TERM HUP; sleep 60", flags=TTY, timeout_ms=50, grace_ms=50)
    )
    assert link.wait(op).outcome == GuestOutcome.TIMED_OUT


def test_output_is_sent_again_after_a_hang_up(guest: Guest, link: Link) -> None:
    op, result = on_terminal(guest, link, "echo first; read a; echo second")
    shown(link, result, b"first")
    with guest.dial(results=link.results) as again:
        again.send(again.credits(op))
        type_in(again, op, 0, b"\n")
        again.wait(op)
    assert result.stdout == b"first\r\n\r\nsecond\r\n"


def test_descriptors_do_not_pile_up(guest: Guest, link: Link) -> None:
    fds = Path(f"/proc/{guest.pid}/fd")

    def some() -> int:
        for _ in range(3):
            op, _ = on_terminal(guest, link, "echo", flags=TTY)
            link.wait(op)
            link.forget(op)
        link.ping()
        return len(list(fds.iterdir()))

    some(), some()  # the guest keeps a few control groups for the next programs
    assert some() == some()


def test_signals_reach_the_session(guest: Guest, link: Link) -> None:
    op, result = on_terminal(guest, link, "trap 'exit 9' USR1; echo ready; while :; do sleep 60 & wait; done")
    shown(link, result, b"ready")
    link.send(signal(op, 10, False))
    assert link.wait(op).code == 9
