"""Shell sessions of the real guest: what stays between commands, what ends them, and what a hostile shell can do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from barchan.wire.frames import FrameType, encode, encode_credit
from barchan.wire.guest import Done, ExecFlag, GuestOutcome, OpKind, run_parts, signal
from tests.host.guest_client import GENEROUS, Guest, Link, exec_parts

EXITED, SIGNALED, TIMED_OUT, CANCELLED, FAILED = GuestOutcome
SHELLS = {"bash": ("bash",), "dash": ("dash",), "busybox": ("busybox", "sh"), "posix": ("bash", "--posix")}
ESRCH, EBUSY = 3, 16
STUCK = "sleep 100; echo no"
INTERRUPTED = {
    "list": STUCK,
    "lines": "sleep 100\necho no\n",
    "and-or": "sleep 100 && echo no || echo no",
    "loop": "while :; do sleep 0.01; done; echo no",
    "busy-loop": "while :; do :; done; echo no",
    "condition": "until sleep 100; do echo no; done; echo no",
    "function": "f() { sleep 100; echo no; }; f; echo no",
    "functions": "f() { while :; do sleep 100; echo no; done; }; g() { f; echo no; }; while :; do g; done; echo no",
    "pipeline": "sleep 100 | cat; echo no",
    "subshell": "(sleep 100; echo no); echo no",
    "substitution": "y=$(sleep 100; echo no); echo no $y",
    "eval": "eval 'sleep 100; echo no'; echo no",
    "case": "case x in x) sleep 100; echo no;; esac; echo no",
    "trap": "trap 'true' INT; sleep 100; echo no",
    "wait": "sleep 100 & wait; echo no",
}


class Shell:
    def __init__(self, guest: Guest, link: Link, *argv: str, flags: int = 0, **options: object) -> None:
        self.guest, self.link, self.op = guest, link, guest.next_op()
        parts = exec_parts(*argv, flags=flags | ExecFlag.SHELL, **options)  # type: ignore[arg-type]
        self.result = link.start(self.op, OpKind.EXEC, parts)

    def begin(self, command: str | bytes, *, timeout_ms: int = 0, grace_ms: int = 1000, limit: int = 1 << 40) -> int:
        op, text = self.guest.next_op(), command.encode() if isinstance(command, str) else command
        parts = run_parts(shell=self.op, timeout_ms=timeout_ms, grace_ms=grace_ms, output_limit=limit, command=text)
        self.link.start(op, OpKind.RUN, parts)
        return op

    def end(self, op: int) -> tuple[Done, bytes, bytes]:
        done, result = self.link.wait(op), self.link.results[op]
        self.link.forget(op)
        return done, result.stdout, result.stderr

    def run(self, command: str | bytes, **options: int) -> tuple[int, bytes, bytes]:
        """Exit code and output of a command that ends by itself."""
        done, out, err = self.end(self.begin(command, **options))
        assert done.outcome == EXITED, done
        return done.code, out, err

    def says(self, command: str) -> str:
        """What it prints. Bash tells of the background processes that were killed as soon as it can."""
        code, out, err = self.run(command)
        assert code == 0 and (err == b"" or b"Killed" in err), err
        return out.decode()

    def closed(self) -> Done:
        return self.link.wait(self.op)


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, guest: Guest, link: Link) -> Shell:
    return Shell(guest, link, *SHELLS[request.param])


@pytest.fixture
def bash(guest: Guest, link: Link) -> Shell:
    return Shell(guest, link, "bash")


# ---- what a command is, and what stays ----


def test_streams_and_exit_codes(shell: Shell) -> None:
    assert shell.run("echo out; echo err >&2; (exit 7)") == (7, b"out\n", b"err\n")
    assert shell.run("") == (0, b"", b"")
    done, _, _ = shell.end(shell.begin("head -c 3000000 /dev/zero | cksum"))
    assert done.background == 0 and done.wall_ns > 0 and 0 < done.user_us + done.system_us < 10_000_000


def test_the_state_stays(shell: Shell) -> None:
    shell.says("cd /usr; x='a  b'; export Y=2; f() { echo \"f:$1\"; }; set -- p q; false || true")
    assert shell.says('echo "$PWD $x $(printenv Y) $*"; f 1') == "/usr a  b 2 p q\nf:1\n"
    assert shell.run("(exit 5)")[0] == 5
    assert shell.says("echo $?") == "5\n"


def test_redirections_stay(shell: Shell, tmp_path: Path) -> None:
    shell.says(f"exec 3>{tmp_path}/f; echo one >&3")
    shell.says("echo two >&3; exec 3>&-")
    assert (tmp_path / "f").read_text() == "one\ntwo\n"
    shell.says(f"exec 5>&1 >{tmp_path}/g; echo aside")
    assert shell.says("echo more; exec >&5 5>&-; echo back") == "back\n"
    assert (tmp_path / "g").read_text() == "aside\nmore\n"


def test_bash_leaves_single_digits_to_commands(bash: Shell, tmp_path: Path) -> None:
    bash.says(f"exec 8>{tmp_path}/f 9>&8; echo one >&9")
    bash.says("echo two >&8")
    assert (tmp_path / "f").read_text() == "one\ntwo\n"


def test_any_text(shell: Shell) -> None:
    assert shell.says("cat <<'EOF'\n$x 'q' \\\n\ttab\nEOF\n") == "$x 'q' \\\n\ttab\n"
    assert shell.says("echo a # comment") == "a\n"
    assert shell.says("echo 'a\n\nb'\\\n'c'\n\n") == "a\n\nbc\n"
    every = bytes(b for b in range(1, 256) if b not in b"'")
    assert shell.run(b"printf %s '" + every + b"'") == (0, every, b"")


@pytest.mark.parametrize("count", [99, 100, 101, 3000])
def test_a_long_command(shell: Shell, count: int) -> None:
    lines = "".join(f"line {i} \\ of many\n" for i in range(count))
    assert shell.says("cat <<'EOF'\n" + lines + "EOF") == lines


def test_the_longest_command(bash: Shell) -> None:
    lines = "".join(f"line {i} of many\n" for i in range(50_000))
    assert bash.says("cat <<'EOF'\n" + lines + "EOF") == lines


@pytest.mark.parametrize("command", ["if", "fi", "echo 'open", "echo $(", "a | | b", "for"])
def test_a_syntax_error_does_not_end_the_session(shell: Shell, command: str) -> None:
    code, out, err = shell.run(command)
    assert code != 0 and out == b"" and b"yntax error" in err or b"EOF" in err
    assert shell.says("echo alive") == "alive\n"


@pytest.mark.parametrize("command", ["break", "continue", "break 2", "continue 2", "break 99", "readonly r=1; r=2"])
def test_stray_control_flow_does_not_end_the_session(shell: Shell, command: str) -> None:
    shell.run(command)
    assert shell.says("for i in 1 2 3; do case $i in 2) continue;; esac; echo $i; done") == "1\n3\n"


def test_nothing_of_ours_is_seen_by_programs(shell: Shell) -> None:
    for _ in range(2):
        assert shell.says("ls /proc/self/fd").split() == ["0", "1", "2", "3"]
        assert shell.run("env | grep barchan")[0] == 1
        shell.says("set -a")
    assert shell.says("readlink /proc/self/fd/0") == "/dev/null\n"


def test_options_stay_and_show_nothing_of_ours(shell: Shell) -> None:
    shell.run("set -x")
    _, out, err = shell.run("echo traced")
    assert out == b"traced\n" and err.strip(b"+ \n") == b"echo traced"
    shell.run("set +x")
    assert shell.run("echo quiet") == (0, b"quiet\n", b"")


def test_errexit(shell: Shell) -> None:
    assert shell.run("set -e; test -f /nonexistent && true")[0] == 1
    assert shell.run("false || test -f /nonexistent && true")[0] == 1
    assert shell.says("echo alive") == "alive\n"
    assert shell.run("echo a; false; echo b") == (1, b"a\n", b"")
    assert (shell.closed().outcome, shell.closed().code) == (EXITED, 1)


def test_traps_of_the_caller(shell: Shell) -> None:
    shell.says("trap 'echo got' USR1; trap 'echo bye' EXIT")
    assert shell.says("kill -USR1 $$; :") == "got\n"
    assert shell.run("exit 3") == (3, b"bye\n", b"")
    assert (shell.closed().outcome, shell.closed().code) == (EXITED, 3)


# ---- ends ----


def test_exit_ends_command_and_session(shell: Shell) -> None:
    assert shell.run("echo last; exit 4; echo no") == (4, b"last\n", b"")
    done = shell.closed()
    assert (done.outcome, done.code) == (EXITED, 4)
    assert shell.result.eof == {1: (0, 0), 2: (0, 0)}
    done, _, _ = shell.end(shell.begin("true"))
    assert (done.outcome, done.code, done.detail) == (FAILED, ESRCH, b"shell")


def test_exec_takes_the_place_of_the_shell(shell: Shell) -> None:
    assert shell.run("exec sh -c 'sleep 0.1; echo replaced; exit 6'") == (6, b"replaced\n", b"")
    assert shell.closed().code == 6


def test_a_signal_to_the_shell(shell: Shell) -> None:
    done, _, _ = shell.end(shell.begin("kill -9 $$; sleep 1"))
    assert (done.outcome, done.code) == (SIGNALED, 9)
    assert (shell.closed().outcome, shell.closed().code) == (SIGNALED, 9)


def test_cancelling_the_session_ends_its_command(guest: Guest, shell: Shell) -> None:
    op = shell.begin("trap '' TERM INT; echo on; sleep 100")
    shell.link.until(lambda: shell.link.results[op].stdout)
    shell.link.send(encode(FrameType.CANCEL, shell.op))
    assert shell.end(op)[0].outcome == CANCELLED
    assert shell.closed().outcome == CANCELLED
    assert not any(guest.pids().values())


def test_no_such_session(guest: Guest, link: Link) -> None:
    plain = guest.next_op()
    link.start(plain, OpKind.EXEC, exec_parts("sleep", "100"))
    for opener in (plain, 10_000, 0):
        op = guest.next_op()
        link.start(op, OpKind.RUN, run_parts(shell=opener, timeout_ms=0, grace_ms=0, output_limit=1, command=b"true"))
        done = link.wait(op)
        assert (done.outcome, done.code, done.detail) == (FAILED, ESRCH, b"shell")


def test_a_shell_that_cannot_start_fails_its_command_too(guest: Guest, link: Link) -> None:
    shell = Shell(guest, link, "/nonexistent/shell")
    op = shell.begin("true")
    done = link.wait(op)
    assert (done.outcome, done.code, done.detail) == (FAILED, ESRCH, b"shell")
    assert (shell.closed().outcome, shell.closed().code, shell.closed().detail) == (FAILED, 2, b"exec")


def test_one_command_at_a_time_and_several_sessions(guest: Guest, link: Link) -> None:
    first, second = Shell(guest, link, "bash"), Shell(guest, link, "dash")
    op = first.begin("while test ! -e /proc/$$/never; do sleep 0.01; done")
    done, _, _ = first.end(first.begin("true"))
    assert (done.outcome, done.code, done.detail) == (FAILED, EBUSY, b"shell")
    assert second.says("echo two") == "two\n"
    link.send(encode(FrameType.CANCEL, op))
    assert first.end(op)[0].outcome == CANCELLED
    assert first.says("echo one") == "one\n"


def test_without_a_program_it_is_bash(guest: Guest, link: Link) -> None:
    assert Shell(guest, link).says('echo "${BASH_VERSION:+bash}"') == "bash\n"


def test_a_command_cancelled_before_the_shell_is_up(guest: Guest, link: Link) -> None:
    for argv in SHELLS.values():
        shell = Shell(guest, link, *argv)
        op = shell.begin("while test ! -e /proc/$$/never; do sleep 0.01; done")
        link.send(encode(FrameType.CANCEL, op))
        assert shell.end(op)[0].outcome == CANCELLED
        assert shell.says("echo alive") == "alive\n"


# ---- background ----


def test_a_background_process_neither_holds_nor_ends(shell: Shell) -> None:
    done, out, _ = shell.end(shell.begin("sleep 100 & echo started"))
    assert (done.outcome, done.background, out) == (EXITED, 1, b"started\n")
    done, out, _ = shell.end(shell.begin(STUCK, timeout_ms=100))
    assert (done.outcome, done.background, out) == (TIMED_OUT, 1, b"")


def test_background_output_belongs_to_the_next_command(shell: Shell) -> None:
    shell.says("(while test ! -e /tmp/go-$$; do sleep 0.01; done; echo later; : > /tmp/went-$$) &")
    pid = shell.says("echo $$").strip()
    go, went = Path(f"/tmp/go-{pid}"), Path(f"/tmp/went-{pid}")
    go.touch()
    try:
        while not went.exists():
            shell.link.ping()
        assert shell.says("true") == "later\n"
    finally:
        go.unlink()
        went.unlink()


def test_a_flood_between_commands_is_bounded_and_kept(guest: Guest, bash: Shell) -> None:
    before = guest.memory_kib()
    bash.says("yes >&1 & flood=$!")
    while guest.memory_kib() < before + 900:
        bash.link.ping()
    for _ in range(50):
        bash.link.ping()
    assert guest.memory_kib() < before + 3 * 1024
    _, out, _ = bash.end(bash.begin("kill $flood; wait 2>/dev/null"))
    assert out.startswith(b"y\ny\n") and len(out) > 1 << 20
    assert bash.says("echo clean") == "clean\n"


# ---- time-outs ----


@pytest.mark.parametrize("kind", INTERRUPTED)
def test_a_time_out_gives_up_the_rest_and_keeps_the_session(shell: Shell, kind: str) -> None:
    shell.says("x=kept")
    done, out, _ = shell.end(shell.begin(INTERRUPTED[kind], timeout_ms=150, grace_ms=2000))
    assert (done.outcome, out) == (TIMED_OUT, b"")
    assert done.wall_ns < 2_000_000_000
    assert shell.says("trap - INT; echo $? $x; for i in 1 2; do echo $i; done") == "0 kept\n1\n2\n"


def test_cancelling_a_command(guest: Guest, shell: Shell) -> None:
    op = shell.begin("echo on; sleep 100 & sleep 100; echo no")
    shell.link.until(lambda: shell.link.results[op].stdout)
    shell.link.send(encode(FrameType.CANCEL, op) * 2)
    done, out, _ = shell.end(op)
    assert (done.outcome, done.background, out) == (CANCELLED, 0, b"on\n")
    assert shell.says("echo alive") == "alive\n"
    assert [len(pids) for pids in guest.pids().values() if pids] == [1]


def test_what_ignores_the_interrupt_is_killed_after_the_grace(shell: Shell) -> None:
    begun = time.monotonic()
    done, out, _ = shell.end(
        shell.begin("sh -c 'trap \"\" INT; sleep 100; sleep 100'; echo no", timeout_ms=50, grace_ms=300)
    )
    assert (done.outcome, out) == (TIMED_OUT, b"")
    assert time.monotonic() - begun > 0.3
    assert shell.says("echo alive") == "alive\n"


def test_no_grace_kills_at_once(shell: Shell) -> None:
    done, out, _ = shell.end(shell.begin("sh -c 'trap \"\" INT; sleep 100'; echo no", timeout_ms=50, grace_ms=0))
    assert (done.outcome, out) == (TIMED_OUT, b"")
    assert shell.says("echo alive") == "alive\n"


@pytest.mark.parametrize(
    "command", ["exec 7</dev/zero; read x <&7", "kill -STOP $$", "trap '' 64; while :; do :; done"]
)
def test_a_shell_that_does_not_come_back_is_ended(guest: Guest, shell: Shell, command: str) -> None:
    done, _, _ = shell.end(shell.begin(command, timeout_ms=50, grace_ms=50))
    assert done.outcome == TIMED_OUT
    assert (shell.closed().outcome, shell.closed().code) == (SIGNALED, 9)
    assert not any(guest.pids().values())


def test_a_signal_goes_to_what_the_command_started(shell: Shell) -> None:
    op = shell.begin("sh -c 'trap \"echo caught; exit 5\" USR1; echo on; while :; do sleep 0.01; done'")
    shell.link.until(lambda: shell.link.results[op].stdout)
    shell.link.send(signal(op, 10, False))
    done, out, _ = shell.end(op)
    assert out.startswith(b"on\ncaught\n") and done.outcome == EXITED


# ---- output ----


def test_output_beyond_the_limit_is_counted_and_dropped(shell: Shell) -> None:
    op = shell.begin("head -c 3000000 /dev/zero; echo >&2", limit=1000)
    shell.end(op)
    assert shell.link.results[op].eof == {1: (3_000_000, 2_999_000), 2: (1, 0)}
    assert shell.says("echo clean") == "clean\n"


def test_much_output_without_credit_waits(guest: Guest) -> None:
    with guest.dial(credit=0) as link:
        shell = Shell(guest, link, "bash")
        op = shell.begin("head -c 5000000 /dev/zero")
        link.ping()
        assert not link.results[op].out[1]
        link.send(encode_credit(op, 1, GENEROUS))
        assert len(shell.end(op)[1]) == 5_000_000


def test_a_command_outlives_the_connection(guest: Guest, bash: Shell) -> None:
    op = bash.begin("echo first; while test ! -e /tmp/go-$$; do sleep 0.01; done; echo second")
    bash.link.until(lambda: bash.link.results[op].stdout)
    pid = bash.link.results[op].started
    with guest.dial(results=bash.link.results) as again:
        again.send(again.credits(op))
        Path(f"/tmp/go-{pid}").touch()
        try:
            assert again.wait(op).code == 0
        finally:
            Path(f"/tmp/go-{pid}").unlink()
    assert bash.link.results[op].stdout == b"first\nsecond\n"


def test_merged_output_keeps_its_order(guest: Guest, link: Link) -> None:
    shell = Shell(guest, link, "bash", flags=ExecFlag.MERGE)
    assert shell.run("echo 1; echo 2 >&2; echo 3") == (0, b"1\n2\n3\n", b"")


def test_closed_output_ends_only_the_stream(shell: Shell) -> None:
    assert shell.run("echo on; exec >/dev/null 2>&1") == (0, b"on\n", b"")
    assert shell.run("echo lost; (exit 3)") == (3, b"", b"")


# ---- a hostile shell ----


@pytest.mark.parametrize("forged", ["x", "99999", "256\\n", "1\\n2\\n", "\\n"])
def test_garbage_on_the_reporting_descriptor_ends_the_session(guest: Guest, link: Link, forged: str) -> None:
    script = f"echo 0 >&9; read -r head <&8; read -r command <&8; printf '{forged}' >&9; exec sleep 100"
    shell = Shell(guest, link, "sh", "-c", script, "sh")
    op = shell.begin("true")
    assert link.wait(op).outcome == (EXITED if forged.startswith("1") else SIGNALED)
    assert shell.closed().outcome == SIGNALED
    link.ping()


def test_reports_that_nobody_asked_for_end_the_session(guest: Guest, link: Link) -> None:
    shell = Shell(guest, link, "sh", "-c", "echo 0 >&9; echo 0 >&9; exec sleep 100", "sh")
    assert shell.closed().outcome == SIGNALED


def test_a_shell_that_never_listens(guest: Guest, link: Link) -> None:
    shell = Shell(guest, link, "sh", "-c", "exec sleep 100", "sh")
    op = shell.begin(b"x" * 900_000, timeout_ms=50)
    assert link.wait(op).outcome == TIMED_OUT
    assert shell.closed().outcome == SIGNALED


def test_the_end_of_a_command_that_was_not_even_read_ends_the_session(guest: Guest, link: Link) -> None:
    shell = Shell(guest, link, "sh", "-c", "echo 0 >&9; read -r head <&8; echo 0 >&9; exec sleep 100", "sh")
    op = shell.begin(b"x" * 900_000)
    assert link.wait(op).outcome == SIGNALED
    assert shell.closed().outcome == SIGNALED


EACH = "for f in /proc/$PPID/fd/*; do if [ -S $f ]; then %s; fi; done 2>/dev/null"
"""Its output is pipes, which whoever is the same user may open."""


def test_other_processes_of_the_user_cannot_forge_a_report(shell: Shell) -> None:
    """They see the descriptors where the shell put them aside, but cannot open them."""
    script = EACH % 'echo "${f##*/}"; echo 0 >$f'
    code, out, _ = shell.run(f"sh -c '{script}'; sleep 0.1; echo late; (exit 7)")
    assert code == 7 and out.endswith(b"late\n") and out.count(b"\n") >= 3


def test_other_processes_of_the_user_cannot_take_a_command(shell: Shell, tmp_path: Path) -> None:
    # Opened while the shell waits: later the same number may be a copy of its output.
    script = EACH % f"(exec 7<$f && {{ timeout 2 cat <&7 >>{tmp_path}/taken & }}); echo"
    assert shell.says(f"sh -c '{script}'").count("\n") >= 2
    for number in range(20):
        assert shell.says(f"echo secret {number}") == f"secret {number}\n"
    assert not (tmp_path / "taken").exists() or not (tmp_path / "taken").read_bytes()


def test_a_thousand_commands_leave_nothing(guest: Guest, bash: Shell) -> None:
    def some(count: int) -> tuple[int, int]:
        for _ in range(count):
            bash.says("true")
        return len(list(Path(f"/proc/{guest.pid}/fd").iterdir())), guest.memory_kib()

    fds, memory = some(50)
    again, more = some(950)
    assert again == fds and more < memory + 128
