"""Commands as the field reports them going wrong: children, input, time limits, output, arguments. On the whole path."""

from __future__ import annotations

import hashlib
import random
import time

import pytest

from barchan import Sandbox, errors
from tests.e2e.watch import all_gone, flat_memory, members
from tests.server import Server

MIB = 1 << 20


# --- background children

ASK = """
import time, urllib.request
while True:
    try:
        print(urllib.request.urlopen("http://127.0.0.1:8000/").status)
        break
    except OSError:
        time.sleep(0.02)
"""


@pytest.mark.parametrize("output", ["", ">/tmp/log 2>&1"], ids=["holding the output", "to a file"])
async def test_a_server_started_with_nohup_goes_on_and_ends_with_the_sandbox(debian: Sandbox, output: str) -> None:
    """CASES 1: the answer comes at once and whole, the server lives on and is listed, and ends with the sandbox."""
    began = time.monotonic()
    done = await debian.run(f"nohup python3 -u -m http.server 8000 {output} & echo hi", cwd="/tmp")
    assert time.monotonic() - began < 2
    assert (done.outcome, done.exit_code, done.stdout, done.background) == ("exited", 0, b"hi\n", 1)
    asked = await debian.run(["python3", "-c", ASK], timeout=20)
    assert asked.stdout == b"200\n"
    listed = [process for process in await debian.processes() if b"http.server" in process.argv]
    assert [process.exec_id for process in listed] == [done.id]
    inside = members(debian)
    assert len(inside) >= 2, "the first process and the server"
    await debian.stop()
    assert all_gone(inside)


# --- input


async def test_input_comes_back_byte_for_byte(sandbox: Sandbox, server: Server) -> None:
    """CASES 2, 16: every byte arrives, then end of file; binary output is exact."""
    for size in (0, 1, 5, 4096, 65_537, 20 * MIB):
        blob = random.Random(size).randbytes(size)
        done = await sandbox.run(["cat"], stdin=blob)
        assert (done.exit_code, done.stdout == blob) == (0, True), size


@pytest.mark.parametrize("command", ["cat", "cat; cat; echo end", "read x; echo $?", "grep foo", "wc -c </dev/stdin"])
async def test_without_input_there_is_end_of_file_at_once(sandbox: Sandbox, command: str) -> None:
    """CASES 2: input and its end."""
    began = time.monotonic()
    done = await sandbox.run(command, timeout=20)
    assert done.outcome == "exited" and time.monotonic() - began < 2


# --- time limits

STUBBORN = """
import os, signal, time

def ignore_all():
    for number in set(range(1, 65)) - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
        signal.signal(number, signal.SIG_IGN)

def beat(name):
    while True:
        with open("/tmp/beat-" + name, "a") as file:
            file.write("x")
        time.sleep(0.02)

ignore_all()
os.umask(0)
for name in ("child", "session", "daemon", "other", "stopped"):
    if os.fork():
        continue
    if name in ("session", "daemon"):
        os.setsid()
    if name == "daemon" and os.fork():
        os._exit(0)
    if name == "daemon":
        os.closerange(0, 100)
    if name == "other":
        os.setuid(12345)
    if name == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    beat(name)
print("begun", flush=True)
time.sleep(600)
"""
BEATING = "until ls /tmp/beat-child /tmp/beat-session /tmp/beat-daemon /tmp/beat-other; do sleep 0.02; done"


async def test_nothing_that_a_command_started_outlives_its_time_limit(debian: Sandbox) -> None:
    """CASES 3: whatever ignores SIGTERM, has its own session, was forked twice, is another user's or stopped, is gone."""
    began = time.monotonic()
    command = await debian.start(["python3", "-c", STUBBORN], timeout=2, grace=0.5)
    assert (await debian.run(BEATING, timeout=20)).exit_code == 0, "the control: all of them run"
    result = await command.wait()
    assert 2 <= time.monotonic() - began < 2 + 0.5 + 2
    assert (result.outcome, result.exit_code) == ("timed_out", None)
    again = time.monotonic()
    sizes = "cat /tmp/beat-* | wc -c"
    before = await debian.run(sizes)
    assert time.monotonic() - again < 1, "the next command works at once"
    assert not [process for process in await debian.processes() if b"python3" in process.argv]
    assert (await debian.run(f"sleep 0.2; {sizes}")).stdout == before.stdout, "nobody beats any more"


async def test_a_time_out_carries_the_output_so_far(sandbox: Sandbox) -> None:
    """CASES 4: of both streams, whole, also what no line end follows."""
    script = "yes 0123456 | head -c 3000000; printf part; printf trouble >&2; sleep 600"
    done = await sandbox.run(script, timeout=3, grace=0)
    assert done.outcome == "timed_out"
    assert done.stdout == b"0123456\n" * 375_000 + b"part" and done.stderr == b"trouble"
    process = await sandbox.start(script, timeout=3, grace=0)
    assert (await process.stdout.read_all(), await process.stderr.read_all()) == (done.stdout, done.stderr)
    assert (await process.wait()).outcome == "timed_out"


# --- output


@pytest.mark.parametrize("read", [True, False], ids=["read", "thrown away"])
async def test_an_endless_output_keeps_memory_flat(server: Server, sandbox: Sandbox, read: bool) -> None:
    """CASES 16: `yes` until its time limit; what is beyond the output limit is counted and said."""
    limit = 100 * MIB
    with flat_memory(server, sandbox):
        process = await sandbox.start(["yes"], timeout=3, grace=0, output_limit=limit)
        size = 0
        if read:
            async for chunk in process.stdout:
                size += len(chunk)
        result = await process.wait()
    assert result.outcome == "timed_out"
    kept = result.stdout_bytes - result.stdout_dropped
    assert kept == min(limit, result.stdout_bytes) > MIB
    assert not read or size == kept
    assert (await sandbox.run("echo next")).stdout == b"next\n"


async def test_two_hundred_megabytes_of_output_keep_memory_flat(server: Server, sandbox: Sandbox) -> None:
    """CASES 16: exact bytes, and client, API, node agent and guest do not grow with them."""
    script = "i=0; while [ $i -lt 20 ]; do cat /tmp/ten; i=$((i+1)); done"
    ten = random.Random(16).randbytes(10_000_000)
    await sandbox.files.write("/tmp/ten", ten)
    digest, size = hashlib.sha256(), 0
    with flat_memory(server, sandbox):
        process = await sandbox.start(script, output_limit=400 * MIB)
        async for chunk in process.stdout:
            digest.update(chunk)
            size += len(chunk)
        result = await process.wait()
    assert (result.exit_code, result.stdout_bytes, result.stdout_dropped, size) == (0, 200_000_000, 0, 200_000_000)
    expected = hashlib.sha256()
    for _ in range(20):
        expected.update(ten)
    assert digest.digest() == expected.digest()


async def test_a_character_cut_by_a_read_boundary_is_whole_again(sandbox: Sandbox) -> None:
    """CASES 16: bytes come as they are written, text is decoded at the end."""
    process = await sandbox.start("printf '\\303'; read x; printf '\\251\\377\\376'", stdin=True)
    assert await process.stdout.read() == b"\xc3", "half a character"
    await process.stdin.write(b"\n")
    assert await process.stdout.read_all() == b"\xa9\xff\xfe"
    await process.wait()
    done = await sandbox.run("printf '\\303'; sleep 0.1; printf '\\251\\377\\376'; printf '\\342\\202' >&2")
    assert (done.stdout, done.stderr) == (b"\xc3\xa9\xff\xfe", b"\xe2\x82")
    assert (done.text, done.stderr_text) == ("é\ufffd\ufffd", "\ufffd")


@pytest.mark.parametrize(("limit", "text"), [(0, ""), (3, "é\ufffd"), (5, "é€"), (9, "é€")])
async def test_truncation_says_so_wherever_it_falls(sandbox: Sandbox, limit: int, text: str) -> None:
    """CASES 16: output of any size and kind."""
    done = await sandbox.run(["printf", "é€"], output_limit=limit)
    assert (done.stdout, done.text) == ("é€".encode()[:limit], text)
    assert (done.exit_code, done.stdout_bytes, done.stdout_dropped) == (0, 5, max(0, 5 - limit))


# --- who, where and with what


async def test_who_a_command_runs_as(sandbox: Sandbox) -> None:
    """CASES 20: root, a named user, numbers; an unknown user is a typed error, for files too."""
    who = "echo $(id -u):$(id -g):$HOME"
    for user, expected in (
        (None, b"0:0:/root\n"),
        ("root", b"0:0:/root\n"),
        ("user", b"1000:1000:/home/user\n"),
        ("1000", b"1000:1000:/home/user\n"),
        ("user:0", b"1000:0:/home/user\n"),
        ("4242:4343", b"4242:4343:/\n"),
    ):
        assert (await sandbox.run(who, user=user)).stdout == expected, user
    for user in ("nobody-here", "user:nobody-here", "-1", "99999999999", "us er", "../root", "ü", ""):
        with pytest.raises((errors.UserNotFound, errors.InvalidRequest)) as failed:
            await sandbox.run(["true"], user=user)
        assert failed.value.field == "user" and failed.value.party == "caller", user
    with pytest.raises(errors.UserNotFound):
        await sandbox.files.read("/etc/passwd", user="nobody-here")


async def test_where_a_command_cannot_start(sandbox: Sandbox) -> None:
    """CASES 20: a directory that is missing, a file, or closed to the user is a typed error that names `cwd`."""
    await sandbox.run("mkdir -m 700 /closed; ln -s /closed /link; ln -s loop /loop")
    for cwd, user, kind in (
        ("/no/such/place", None, errors.FileMissing),
        ("relative", None, errors.FileMissing),
        ("/etc/passwd", None, errors.FileNotDirectory),
        ("/closed", "user", errors.FileDenied),
        ("/link", "user", errors.FileDenied),
        ("/loop", None, errors.FileFailure),
        ("/" + "x" * 300, None, errors.FileFailure),
    ):
        with pytest.raises(kind) as failed:
            await sandbox.run(["true"], cwd=cwd, user=user)
        assert failed.value.field == "cwd", cwd
    assert (await sandbox.run(["pwd"], cwd="tmp")).stdout == b"/tmp\n", "relative ones start at /"


async def test_two_thousand_odd_variables_arrive_as_they_are(sandbox: Sandbox) -> None:
    """CASES 20: any byte but NUL, and `=` in a name; names that no shell could set; empty values."""
    dice = random.Random(20)

    def odd(least: int) -> bytes:
        return bytes(dice.randrange(1, 256) for _ in range(dice.randrange(least, 60)))

    env: dict[str | bytes, str | bytes] = {odd(1).replace(b"=", b"_") + b"%d" % i: odd(0) for i in range(2000)}
    env |= {"A B": "spaces", "x-y.z": "$(id)", "é": "ü\n'\"`\\", "LAST": "="}
    seen = (await sandbox.run(["cat", "/proc/self/environ"], env=env)).stdout.split(b"\0")
    assert {_bytes(key) + b"=" + _bytes(value) for key, value in env.items()} <= set(seen)
    assert len(seen) == len(set(seen)), "none twice"


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


@pytest.mark.parametrize("seed", range(4))
async def test_random_arguments_arrive_as_they_are(sandbox: Sandbox, seed: int) -> None:
    """CASES 20: bytes without NUL, no shell and no quoting in between."""
    dice = random.Random(seed)
    argv = [bytes(dice.randrange(1, 256) for _ in range(dice.randrange(200))) for _ in range(200)]
    seen = (await sandbox.run([b"cat", b"/proc/self/cmdline", b"--", b"/dev/null"])).stdout
    assert seen == b"cat\0/proc/self/cmdline\0--\0/dev/null\0"
    done = await sandbox.run([b"sh", b"-c", b"cat /proc/$$/cmdline; :", *argv])
    assert done.stdout.split(b"\0")[3:-1] == argv


KIB = 1 << 10


async def test_arguments_up_to_what_the_kernel_takes(sandbox: Sandbox) -> None:
    """CASES 20: 128 KiB less its NUL is the kernel's limit for one; all together nearly 2 MiB; beyond is a typed error."""
    size = ["sh", "-c", 'a="$*"; echo $# ${#a}', "sh"]
    longest = "x" * (128 * KIB - 1)
    assert (await sandbox.run([*size, longest])).stdout == b"1 131071\n"
    assert (await sandbox.run([*size, *[longest] * 14])).stdout == b"14 %d\n" % (14 * 128 * KIB - 1)
    for argv in ([*size, longest + "x"], [*size, *[longest] * 15], ["true", *["y" * 64 * KIB] * 64]):
        with pytest.raises(errors.InvalidRequest) as failed:
            await sandbox.run(argv)
        assert failed.value.field == "argv"
    with pytest.raises(errors.InvalidRequest) as failed:
        await sandbox.run(["true"], env={"LONG": longest + "x"})
    assert (await sandbox.run("echo alive")).stdout == b"alive\n"
