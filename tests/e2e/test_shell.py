"""Shell sessions, the whole way: what stays between commands, how each ends, and how the session does."""

from __future__ import annotations

import hashlib
import time
from functools import partial

import pytest

from barchan import Client, Sandbox, errors
from tests.rig import beside, pause, together, within

MIB = 1 << 20


# --- what stays


async def test_directory_variables_functions_and_options_stay(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        await shell.run("mkdir -p /srv/a && cd /srv/a && export X=1 Y='two words'; Z=3")
        await shell.run("greet() { echo hello $1 $X; }; set -u; umask 027")
        assert (await shell.run("pwd")).stdout == b"/srv/a\n"
        assert (await shell.run('echo $X "$Y" $Z; env | grep -c "^[XYZ]="')).stdout == b"1 two words 3\n2\n"
        assert (await shell.run("greet you")).stdout == b"hello you 1\n"
        assert (await shell.run("umask; case $- in *u*) echo u;; esac")).stdout == b"0027\nu\n"
        await shell.run("exec 3>/srv/a/kept; cd ..")
        await shell.run("echo to three >&3")
    assert await sandbox.files.read("/srv/a/kept") == b"to three\n"


async def test_sessions_do_not_know_each_other(sandbox: Sandbox) -> None:
    shells = [sandbox.shell() for _ in range(4)]
    await together(*(shell.open for shell in shells))
    await together(*(partial(shell.run, f"cd /; N={i}; sleep 0.1") for i, shell in enumerate(shells)))
    results = await together(*(partial(shell.run, "echo $N") for shell in shells))
    assert [r.stdout for r in results] == [b"%d\n" % i for i in range(4)]
    await together(*(shell.close for shell in shells))


async def test_calls_on_one_session_wait_their_turn(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        await shell.run("n=0")
        line = "a=$n; sleep 0.0$((a % 3)); n=$((a + 1)); echo $n"
        results = await together(*(partial(shell.run, line) for _ in range(20)))
        assert [int(r.stdout) for r in results] == list(range(1, 21))


async def test_how_a_session_is_opened(sandbox: Sandbox) -> None:
    options = {"cwd": "/tmp", "env": {"GIVEN": "yes"}, "secrets": {"KEY": "hidden"}, "user": "user"}
    async with sandbox.shell("/bin/ash", **options) as shell:  # type: ignore[arg-type]
        done = await shell.run('pwd; echo $GIVEN $KEY; id -u; echo "$0"')
        assert done.text.splitlines()[:3] == ["/tmp", "yes hidden", "1000"]
    with pytest.raises(errors.ShellEnded, match="not found"):
        await sandbox.shell("/bin/nothing").open()
    with pytest.raises(errors.UserNotFound):
        await sandbox.shell(user="nobody-here").open()
    with pytest.raises(errors.FileMissing):
        await sandbox.shell(cwd="/nowhere").open()


async def test_bash_where_there_is_one(debian: Sandbox, sandbox: Sandbox) -> None:
    async with debian.shell() as bash, sandbox.shell() as sh:
        assert (await bash.run("echo ${BASH_VERSION:+bash}; a=(1 2 3); echo ${#a[@]}")).stdout == b"bash\n3\n"
        assert (await sh.run('echo "${BASH_VERSION:-none}"')).stdout == b"none\n"


# --- results


async def test_results_are_those_of_a_command(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        done = await shell.run("echo out; echo err >&2; false")
        assert (done.outcome, done.exit_code, done.stdout, done.stderr) == ("exited", 1, b"out\n", b"err\n")
        assert (await shell.run("true")).ok
        assert (await shell.run("nothing-there")).exit_code == 127
        assert (await shell.run("(exit 41)")).exit_code == 41
        assert (await shell.run("sh -c 'kill -9 $$'")).exit_code == 137
        assert (await shell.run("")).exit_code == 0
        assert (await shell.run("# only a word")).exit_code == 0
        with pytest.raises(errors.CommandFailed):
            await shell.run("false", check=True)


async def test_lines_of_every_kind(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        assert (await shell.run("for i in 1 2\ndo\n  echo $i\ndone")).stdout == b"1\n2\n"
        assert (await shell.run("cat <<'END'\n$x `y` \"z\nEND")).stdout == b'$x `y` "z\n'
        assert (await shell.run("printf '%s' \"it's\" # no newline")).stdout == b"it's"
        assert (await shell.run("echo 0; echo 1; printf '0\\n'")).stdout == b"0\n1\n0\n", "numbers are no reports"
        assert (await shell.run("echo 'ä ö €'")).text == "ä ö €\n"
        assert (await shell.run(b"printf '%s' '\xff\xfe' | od -An -tx1 2>/dev/null || true")).outcome == "exited"
        long = "x" * 100_000
        assert (await shell.run(f"v={long}; echo ${{#v}}")).stdout == b"100000\n"


async def test_input_is_at_its_end(sandbox: Sandbox) -> None:
    """A command that reads does not eat the ones after it."""
    async with sandbox.shell() as shell:
        assert (await shell.run("cat; echo done", timeout=10)).stdout == b"done\n"
        assert (await shell.run("read x; echo got:$x", timeout=10)).stdout == b"got:\n"
        assert (await shell.run("echo next")).stdout == b"next\n"


async def test_much_output_and_every_byte(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        done = await shell.run("yes 0123456789abcde | head -c 1048576")
        assert done.stdout == b"0123456789abcde\n" * 65536
        await shell.run("dd if=/dev/urandom of=/tmp/random bs=65536 count=32 2>/dev/null")
        done = await shell.run("cat /tmp/random; cat /tmp/random >&2")
        assert len(done.stdout) == 2 * MIB and done.stdout == done.stderr
        digest = (await shell.run("sha256sum /tmp/random")).text.split()[0]
        assert hashlib.sha256(done.stdout).hexdigest() == digest
        cut = await shell.run("yes | head -c 100000", output_limit=1000)
        assert (len(cut.stdout), cut.stdout_dropped) == (1000, 99_000)
        assert (await shell.run("echo next")).stdout == b"next\n"


async def test_output_comes_while_it_runs(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        await shell.run("mkfifo /tmp/go 2>/dev/null || busybox mkfifo /tmp/go")
        process = await shell.start("echo first; read x < /tmp/go; echo $x")
        assert await process.stdout.read() == b"first\n"
        await sandbox.run("echo second > /tmp/go")
        assert await process.stdout.read_all() == b"second\n"
        assert (await process.wait()).exit_code == 0


# --- what is left running


async def test_background_children_hold_nothing_up(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        began = time.monotonic()
        done = await shell.run("sleep 300 & echo started")
        assert time.monotonic() - began < 5
        assert (done.stdout, done.background >= 1) == (b"started\n", True)
        async with within(10):
            while [p.argv for p in await sandbox.processes()].count((b"sleep", b"300")) != 1:
                await pause()
        assert (await shell.run("kill $!; wait $!")).exit_code == 143, "it is still a child of this shell"
        assert [p.argv for p in await sandbox.processes() if b"300" in p.argv] == []


async def test_the_session_is_among_the_processes(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        pid = int((await shell.run("echo $$")).stdout)
        (found,) = [p for p in await sandbox.processes() if p.pid == pid]
        assert found.exec_id == shell.id


async def test_closing_ends_everything_in_it(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        await shell.run("sleep 301 & setsid sleep 302 & (trap '' TERM; sleep 303) &")
        waiting = beside(shell.run, "sleep 304")
        await until_running(sandbox, b"304")
    assert (await waiting).outcome in ("cancelled", "signaled")
    assert [p.argv for p in await sandbox.processes() if p.pid != 1] == []


async def until_running(sandbox: Sandbox, word: bytes) -> None:
    async with within(10):
        while not any(word in p.argv for p in await sandbox.processes()):
            await pause()


# --- ends


@pytest.mark.parametrize(
    "command",
    ["sleep 400", "sh -c \"trap '' INT TERM; sleep 401\"", "while :; do :; done", "while sleep 402; do :; done"],
)
async def test_a_time_limit_leaves_the_session(sandbox: Sandbox, command: str) -> None:
    async with sandbox.shell() as shell:
        await shell.run("cd /tmp; X=kept")
        began = time.monotonic()
        done = await shell.run(f"echo before; {command}", timeout=0.5, grace=0.3)
        assert time.monotonic() - began < 5
        assert (done.outcome, done.exit_code, done.stdout) == ("timed_out", None, b"before\n")
        assert [p.argv for p in await sandbox.processes() if b"40" in b" ".join(p.argv)] == []
        assert (await shell.run("pwd; echo $X")).stdout == b"/tmp\nkept\n"


async def test_a_cancelled_call_leaves_the_session(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        await shell.run("cd /tmp")
        waiting = beside(shell.run, "sleep 405")
        await until_running(sandbox, b"405")
        waiting.cancel()
        assert (await shell.run("pwd")).stdout == b"/tmp\n"
        assert [p.argv for p in await sandbox.processes() if b"405" in p.argv] == []


async def test_a_command_can_be_interrupted(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        process = await shell.start("sleep 406")
        await until_running(sandbox, b"406")
        await process.signal(2)
        assert (await process.wait()).exit_code == 130
        assert (await shell.run("echo on")).stdout == b"on\n"


@pytest.mark.parametrize(
    ("command", "outcome", "code", "how"),
    [
        ("echo bye; exit 3", "exited", 3, "exit code 3"),
        ("echo bye; kill -9 $$", "signaled", 137, "signal 9"),
        ("exec sh -c 'echo bye; exit 4'", "exited", 4, "exit code 4"),
    ],
)
async def test_a_command_that_ends_the_shell(sandbox: Sandbox, command: str, outcome: str, code: int, how: str) -> None:
    shell = sandbox.shell()
    await shell.open()
    done = await shell.run(command)
    assert (done.outcome, done.exit_code, done.stdout) == (outcome, code, b"bye\n")
    for _ in range(2):
        with pytest.raises(errors.ShellEnded, match=how):
            await shell.run("echo no")
    await shell.close()


# --- the record


async def test_a_command_is_answered_from_the_record(client: Client, sandbox: Sandbox) -> None:
    async with sandbox.shell(id="session") as shell:
        first = await shell.run("echo x >> /tmp/count; cat /tmp/count", id="line-1")
        again = (
            await (await client.get(sandbox.id))
            .shell(id="session")
            .run("echo x >> /tmp/count; cat /tmp/count", id="line-1")
        )
        assert first == again and again.stdout == b"x\n"
        with pytest.raises(errors.Conflict):
            await shell.run("echo other", id="line-1")
    replayed = await sandbox.attach("line-1")
    assert await replayed.stdout.read_all() == b"x\n"
    history = {info.id: info for info in await sandbox.execs()}
    assert history["line-1"].argv == (b"echo x >> /tmp/count; cat /tmp/count",)
    assert (history["line-1"].shell, history["session"].shell) == ("session", None)
    assert history["session"].result is not None and history["session"].result.outcome == "cancelled"


async def test_what_a_session_costs(sandbox: Sandbox) -> None:
    """A loose bound against something silly in between, such as a poll: the figure is the benchmark's."""
    async with sandbox.shell() as shell:
        await shell.run("true")
        began = time.monotonic()
        for _ in range(50):
            await shell.run("true")
        in_shell = time.monotonic() - began
        began = time.monotonic()
        for _ in range(50):
            await sandbox.run(["true"])
        assert in_shell < 3 * (time.monotonic() - began) + 0.5
