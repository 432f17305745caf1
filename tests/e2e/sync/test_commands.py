# Generated from tests/e2e/test_commands.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""Running commands, the whole way: background children, input, time-outs, output, identities, odd arguments."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from barchan import errors
from barchan.sync import Client, Limits, Sandbox
from tests.rig_sync import Cancelled, beside, pause, together, within

MIB = 1 << 20


# --- background children


@pytest.mark.parametrize(
    "command",
    [
        "sleep 300 & echo hi",
        "(sleep 300 &) ; echo hi",
        "trap '' HUP; sleep 300 >/dev/null 2>&1 & echo hi",
        "setsid sleep 300 & echo hi",
    ],
)
def test_a_background_child_does_not_hold_the_answer(sandbox: Sandbox, command: str) -> None:
    """CASES 1: background children."""
    began = time.monotonic()
    done = sandbox.run(command)
    assert time.monotonic() - began < 2
    assert (done.outcome, done.exit_code, done.stdout) == ("exited", 0, b"hi\n")
    assert done.background >= 1
    with within(5):  # it may still be the shell that is about to become it
        while not (sleepers := [p for p in sandbox.processes() if b"300" in p.argv]):
            pause()
    assert len(sleepers) == 1, "the child lives on and is listed"
    assert sleepers[0].exec_id == done.id


def test_a_background_child_ends_with_the_sandbox(client: Client, sandbox: Sandbox) -> None:
    """CASES 1: background children."""
    sandbox.run("sleep 300 &")
    sandbox.stop()
    with pytest.raises(errors.SandboxStopped):
        sandbox.run("true")
    assert client.get(sandbox.id).info.state == "stopped"


def test_output_of_a_background_child_can_be_waited_for(sandbox: Sandbox) -> None:
    late = "(sleep 0.3; echo late) & echo now"
    assert sandbox.run(late).stdout == b"now\n"
    assert sandbox.run(late, keep_background=True).stdout == b"now\nlate\n"


def test_a_noisy_background_child_blocks_nothing(sandbox: Sandbox) -> None:
    done = sandbox.run("yes & echo started")
    assert b"started\n" in done.stdout
    assert sandbox.run("echo next").stdout == b"next\n"


# --- input


@pytest.mark.parametrize("command", [["cat"], ["sh", "-c", "read x; echo got:$x"], ["grep", "foo"]])
def test_without_input_programs_read_end_of_file(sandbox: Sandbox, command: list[str]) -> None:
    """CASES 2: input and its end."""
    done = sandbox.run(command, timeout=5)
    assert done.outcome == "exited"
    assert done.stdout in (b"", b"got:\n")


def test_every_byte_of_input_arrives(sandbox: Sandbox) -> None:
    """CASES 2: input and its end."""
    assert sandbox.run(["cat"], stdin=b"12345").stdout == b"12345"
    big = os.urandom(MIB) * 50
    done = sandbox.run(["sha256sum"], stdin=big)
    assert done.stdout.split()[0].decode() == hashlib.sha256(big).hexdigest()


def test_a_program_may_leave_its_input_unread(sandbox: Sandbox) -> None:
    done = sandbox.run(["true"], stdin=b"x" * (5 * MIB), timeout=20)
    assert done.exit_code == 0


# --- time-outs

STUBBORN = """
trap '' TERM
(trap '' TERM; sleep 400) &
setsid sh -c "trap '' TERM; sleep 401" &
(setsid sh -c "trap '' TERM; sleep 402 & sleep 403" &)
echo before
sleep 404
"""


def test_a_time_limit_ends_the_whole_tree(sandbox: Sandbox) -> None:
    """CASES 3, 4: time limits end everything, and the output so far is kept."""
    began = time.monotonic()
    done = sandbox.run(STUBBORN, timeout=2, grace=0.5)
    took = time.monotonic() - began
    assert done.outcome == "timed_out" and done.exit_code is None
    assert 2 <= took < 2 + 0.5 + 1.5
    assert done.stdout == b"before\n", "the output so far comes with it"
    left = [p.argv for p in sandbox.processes() if b"sleep" in p.argv[:1] or b"40" in b" ".join(p.argv)]
    assert not left
    assert sandbox.run("echo again").stdout == b"again\n"


def test_a_time_limit_beats_a_chain_of_forks(sandbox: Sandbox) -> None:
    """CASES 3: Each link forks the next and exits: whoever looks at a list of processes comes too late."""
    chain = "f() { (f &) ; exit; }; f"
    done = sandbox.run(f"{chain} & sleep 5", timeout=1, grace=0)
    assert done.outcome == "timed_out"
    assert [p for p in sandbox.processes() if p.pid != 1] == []


def test_exit_code_124_is_not_a_time_out(sandbox: Sandbox) -> None:
    """CASES 3: time limits end everything."""
    done = sandbox.run("exit 124")
    assert (done.outcome, done.exit_code) == ("exited", 124)


def test_cancelling_ends_the_command(sandbox: Sandbox) -> None:
    process = sandbox.start("sleep 500")
    process.cancel()
    assert process.wait().outcome == "cancelled"
    assert not [p for p in sandbox.processes() if b"500" in p.argv]


def test_cancelling_the_caller_ends_the_command(sandbox: Sandbox) -> None:
    running = beside(sandbox.run, "echo x; sleep 501")
    with within(5):
        while not [p for p in sandbox.processes() if b"501" in p.argv]:
            pause()
    running.cancel()
    with pytest.raises(Cancelled):
        running.wait()
    with within(5):
        while [p for p in sandbox.processes() if b"501" in p.argv]:
            pause()


@pytest.mark.parametrize(("number", "code"), [(15, 143), (9, 137), (2, 130)])
def test_signals(sandbox: Sandbox, number: int, code: int) -> None:
    process = sandbox.start(["sleep", "502"])
    process.signal(number)
    result = process.wait()
    assert (result.outcome, result.signal, result.exit_code) == ("signaled", number, code)


# --- output


def test_bytes_are_exact(sandbox: Sandbox) -> None:
    """CASES 16: output of any size and kind."""
    blob = bytes(range(256)) * 1000 + b"\xff\xfe\n"
    sandbox.files.write("/tmp/blob", blob)
    assert sandbox.run(["cat", "/tmp/blob"]).stdout == blob


def test_text_is_decoded_at_the_end(sandbox: Sandbox) -> None:
    """CASES 16: A character cut by a read boundary is whole again; what is no text stays readable."""
    text = "ä€😀" * 40_000
    sandbox.files.write("/tmp/text", text.encode())
    assert sandbox.run(["cat", "/tmp/text"]).text == text
    assert sandbox.run("printf '\\377\\376x'").text == "\ufffd\ufffdx"


def test_streams_are_apart_or_merged(sandbox: Sandbox) -> None:
    done = sandbox.run("echo out; echo err >&2")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
    done = sandbox.run("echo out; echo err >&2; echo end", merge_stderr=True)
    assert (done.stdout, done.stderr) == (b"out\nerr\nend\n", b"")


def test_truncation_says_so(sandbox: Sandbox) -> None:
    """CASES 16: output of any size and kind."""
    done = sandbox.run("yes | head -c 3000000", output_limit=MIB)
    assert len(done.stdout) == MIB
    assert (done.stdout_bytes, done.stdout_dropped) == (3_000_000, 3_000_000 - MIB)
    assert done.exit_code == 0, "the program was not blocked or killed for it"


def test_a_flood_is_bounded(sandbox: Sandbox) -> None:
    """CASES 16: output of any size and kind."""
    done = sandbox.run("yes", timeout=3, grace=0, output_limit=2 * MIB)
    assert done.outcome == "timed_out"
    assert len(done.stdout) == 2 * MIB and done.stdout_dropped > 0


def test_output_is_streamed_as_it_comes(sandbox: Sandbox) -> None:
    process = sandbox.start("echo one; read x; echo two:$x", stdin=True)
    chunks = process.stdout.__iter__()
    assert next(chunks) == b"one\n", "before the program ended"
    process.stdin.write(b"in\n")
    process.stdin.close()
    assert next(chunks) == b"two:in\n"
    assert process.wait().exit_code == 0


def test_attaching_to_an_ended_command_with_much_output(sandbox: Sandbox) -> None:
    """More than a receiver takes ahead: the node cannot answer before the caller reads."""
    command = "yes 0123456 | head -c 3000000"
    done = sandbox.run(command, id="big")
    assert len(done.stdout) == 3_000_000
    with within(20):
        for offset in (0, 1_500_000):
            process = sandbox.attach("big", stdout_offset=offset)
            assert process.stdout.read_all() == done.stdout[offset:]
            assert process.wait().exit_code == 0
        both = [sandbox.attach("big"), sandbox.start(command, id="big")]
        assert together(*(process.stdout.read_all for process in both)) == [done.stdout] * 2
        assert both[1].wait().id == "big"


def test_attaching_to_a_running_command_tells_its_process(sandbox: Sandbox) -> None:
    process = sandbox.start("yes 0123456 | head -c 3000000; read x", stdin=True)
    again = sandbox.attach(process.id)
    assert again.pid == process.pid != 0
    process.cancel()


# --- how it may fail to start


@pytest.mark.parametrize(
    ("argv", "outcome", "code"),
    [
        (["/no/such/program"], "not_found", 127),
        (["no-such-program"], "not_found", 127),
        (["/etc/passwd"], "not_executable", 126),
        (["/tmp"], "not_executable", 126),
    ],
)
def test_a_program_that_cannot_start_is_a_result(sandbox: Sandbox, argv: list[str], outcome: str, code: int) -> None:
    done = sandbox.run(argv)
    assert (done.outcome, done.exit_code) == (outcome, code)


def test_a_missing_directory_is_an_error_of_the_caller(sandbox: Sandbox) -> None:
    """CASES 20: who, where and with what a command runs."""
    with pytest.raises(errors.FileMissing) as failed:
        sandbox.run(["true"], cwd="/no/such/place")
    assert failed.value.field == "cwd"


# --- identities


def test_users(sandbox: Sandbox) -> None:
    """CASES 20: who, where and with what a command runs."""
    assert sandbox.run("id -u; echo $HOME").stdout == b"0\n/root\n"
    assert sandbox.run("id -u; echo $HOME", user="user").stdout == b"1000\n/home/user\n"
    assert sandbox.run("id -u; id -g", user="4242:4343").stdout == b"4242\n4343\n"
    with pytest.raises(errors.UserNotFound) as failed:
        sandbox.run("id", user="nobody-here")
    assert failed.value.field == "user" and failed.value.party == "caller"


def test_an_ordinary_user_has_no_powers(sandbox: Sandbox) -> None:
    done = sandbox.run("grep Cap /proc/self/status; cat /root/x; touch /etc/x; kill -9 1", user="user")
    assert b"CapEff:\t0000000000000000" in done.stdout and b"CapPrm:\t0000000000000000" in done.stdout
    assert done.exit_code != 0


# --- arguments and environment


def test_odd_arguments_arrive_as_they_are(sandbox: Sandbox) -> None:
    """CASES 20: who, where and with what a command runs."""
    argv = [b"a b", b"'", b'"', b"$(id)", b"*", b"", b"-n", bytes(range(1, 256)), "ü€".encode()]
    done = sandbox.run(["sh", "-c", 'for a; do printf "%s\\0" "$a"; done', "sh", *argv])
    assert done.stdout.split(b"\0")[:-1] == argv


def test_large_arguments_and_environments(sandbox: Sandbox) -> None:
    """CASES 20: who, where and with what a command runs."""
    long = b"x" * (128 * 1024 - 1)
    assert sandbox.run(["sh", "-c", "echo ${#1}", "sh", long]).stdout == b"131071\n"
    env = {f"VAR_{i}": f"value {i}" for i in range(2000)}
    lines = sandbox.run(["env"], env=env).text.splitlines()
    assert {f"{k}={v}" for k, v in env.items()} <= set(lines)
    with pytest.raises(errors.InvalidRequest) as failed:
        sandbox.run(["true", *[b"y" * 131_000] * 64])
    assert failed.value.field == "argv"


def test_nul_and_nonsense_are_refused_by_name(client: Client, sandbox: Sandbox, tiny_env: str) -> None:
    for request, field in (
        (lambda: sandbox.run(["a\0b"]), "argv"),
        (lambda: sandbox.run(["true"], env={"A": "x\0"}), "env"),
        (lambda: sandbox.run([]), "argv"),
        (lambda: sandbox.run(["true"], timeout=-1), "timeout"),
        (lambda: client.create(tiny_env, limits=Limits(memory=-1)), "limits.memory"),
        (lambda: client.create("../../etc"), "environment.base"),
    ):
        with pytest.raises(errors.InvalidRequest) as failed:
            request()
        assert failed.value.field == field
    with pytest.raises(errors.EnvironmentNotFound):
        client.create("tinyy")


def test_secrets_reach_the_program_and_nothing_else(client: Client, tiny_env: str, data_dir: Path) -> None:
    value = f"hunter2-{os.urandom(8).hex()}"
    with client.create(tiny_env, secrets={"TOKEN": value}) as box:
        assert box.run("echo ${#TOKEN}; echo ${#ONCE}", secrets={"ONCE": value}).stdout == b"24\n24\n"
        for segment in (data_dir / "log").iterdir():
            assert value.encode() not in segment.read_bytes()


# --- when the sandbox has ended


def test_what_ran_in_a_sandbox_that_has_ended_can_be_read(client: Client, tiny_env: str) -> None:
    sandbox = client.create(tiny_env)
    done = sandbox.run("echo out; echo err >&2; exit 3", id="a")
    process = sandbox.start("echo begun; sleep 600", id="b")
    assert process.stdout.read() == b"begun\n"
    sandbox.stop()
    found = client.get(sandbox.id)
    assert [(e.id, e.argv[-1]) for e in found.execs()] == [
        ("a", b"echo out; echo err >&2; exit 3"),
        ("b", b"echo begun; sleep 600"),
    ]
    again = found.attach("a")
    assert (again.stdout.read_all(), again.stderr.read_all()) == (b"out\n", b"err\n")
    assert again.wait().exit_code == 3 == done.exit_code
    assert found.attach("a", stdout_offset=2).stdout.read_all() == b"t\n"
    cut_short = found.attach("b")
    assert cut_short.stdout.read_all() == b"begun\n"
    with pytest.raises(errors.SandboxStopped):
        cut_short.wait()
    with pytest.raises(errors.ExecNotFound):
        found.attach("c")
    with pytest.raises(errors.SandboxStopped):
        found.run("true")
