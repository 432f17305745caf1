"""The real guest in a sandbox whose programs do what they can against it: hostile account files, no memory left."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.backends.spawner import SpawnFlag
from barchan.wire.frames import FrameType, encode
from barchan.wire.guest import Done, ExecFlag, GuestOutcome, OpKind, run_parts
from tests.host import spawn_site
from tests.host.guest_client import exec_parts
from tests.host.spawn_site import Inside, Site, inside

SYS_RESOURCE = 1 << 24
MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("spawner")) as made:
        yield made


# ---- accounts ----


HOSTILE = {
    "unreadable": "touch {0}; chmod 0 {0}",
    "fifo": "busybox mkfifo {0}",
    "directory": "mkdir {0}",
    "too-large": "dd if=/dev/zero of={0} bs=1M count=2 2>/dev/null",
    "looping": "busybox ln -s {0} {0}",
    "descriptor": "busybox ln -s /proc/self/fd/4/cgroup.procs {0}",
    "guests-root": "busybox ln -s /proc/1/root/etc/passwd {0}",
    "guests-status": "busybox ln -s /proc/self/status {0}",
    "kernels": "busybox ln -s /proc/cpuinfo {0}",
}
"""How each kind of file is made."""


@pytest.mark.parametrize("kind", HOSTILE)
async def test_numbers_work_whatever_the_account_files_are(site: Site, kind: str) -> None:
    def attempt(within: Inside) -> None:
        within.sh("mkdir /etc; " + "; ".join(HOSTILE[kind].format(f"/etc/{name}") for name in ("passwd", "group")))
        for user, shown in (
            (b"", "0 0"),
            (b"root", "0 0"),
            (b"root:root", "0 0"),
            (b"0", "0 0"),
            (b"1000", "1000 0"),
            (b"1000:1001", "1000 1001"),
        ):
            done = within.program("/bin/grep", "-E", "^[UG]id:", "/proc/self/status", user=user)
            assert (done.outcome, b" ".join(within.out.split()[1::5]).decode()) == (GuestOutcome.EXITED, shown), done
        for user in (b"nobody", b"0:nogroup"):
            done = within.program("/bin/true", user=user)
            assert (done.outcome, done.detail) == (GuestOutcome.FAILED, b"user") and done.code != 0

    await inside(site, attempt)


TERMINALS = 32


async def test_a_program_for_which_no_terminal_is_left(site: Site) -> None:
    def attempt(within: Inside) -> None:
        parts = exec_parts("/bin/sleep", "600", flags=ExecFlag.TTY)
        running = range(within.last + 1, within.last + 1 + TERMINALS)
        within.last += TERMINALS
        for op in running:
            within.link.start(op, OpKind.EXEC, parts)
        within.link.until(lambda: all(within.link.results[op].started for op in running))
        done = within.call(OpKind.EXEC, parts)
        assert (done.outcome, done.code, done.detail) == (GuestOutcome.FAILED, errno.ENOSPC, b"tty")
        assert within.sh("echo alive") == "alive\n"

    await inside(site, attempt)


async def test_more_groups_than_the_kernel_takes(site: Site) -> None:
    def attempt(within: Inside) -> None:
        within.sh("mkdir /etc; printf 'root:x:0:0::/:\\nu:x:1000:1000::/:\\n' > /etc/passwd")
        within.sh("busybox seq 70000 | busybox sed 's/.*/g:x:&:u/' > /etc/group")
        for user, count in ((b"", 0), (b"u", 1024), (b"1000", 1024)):
            done = within.program("/bin/grep", "Groups:", "/proc/self/status", user=user)
            assert (done.outcome, len(within.out.split()) - 1) == (GuestOutcome.EXITED, count), (user, done)

    await inside(site, attempt)


# ---- memory ----


def privileged() -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:\t")[2].split()[0], 16) & SYS_RESOURCE)


async def test_programs_stand_above_the_guest_when_memory_runs_out(site: Site) -> None:
    """What a program may do about it is sink to the guest's own score."""
    script = "until [ $(cat /proc/$$/oom_score_adj) = 321 ]; do :; done; echo $(cat /proc/1/oom_score_adj)"

    def attempt(within: Inside) -> None:
        for user in (b"", b"1000"):
            assert within.program("/bin/sh", "-c", script, user=user).code == 0
            assert int(within.out) == (321 if privileged() else 0)
            within.program("/bin/sh", "-c", "echo -1 > /proc/self/oom_score_adj", user=user)
            assert within.program("/bin/sh", "-c", "cat /proc/1/oom_score_adj", user=user).code == 0
            assert int(within.out) == (321 if privileged() else 0)

    await inside(site, attempt, oom_score_adj=321)


@pytest.mark.parametrize("flags", [SpawnFlag(0), SpawnFlag.SETUID], ids=["clone3", "moved"])
async def test_the_guest_outlives_programs_that_use_up_the_memory(site: Site, flags: SpawnFlag) -> None:
    if not (MEMORY / "memory.limit_in_bytes").exists():
        pytest.skip("no v1 memory hierarchy")
    group = MEMORY / f"barchan-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(128 << 20))
        tasks = os.open(group / "tasks", os.O_WRONLY)

        def attempt(within: Inside) -> None:
            for _ in range(3):
                done = within.program("/bin/hold_memory", "12", "20")
                assert done.outcome == GuestOutcome.EXITED, done
                lowered, killed = within.out.decode().splitlines()
                assert lowered == ("lowered no" if privileged() else "lowered yes") and killed != "killed 0"

        try:
            await inside(site, attempt, flags, groups=(tasks,), oom_score_adj=300)
        finally:
            os.close(tasks)
    finally:
        spawn_site.remove_group(group)


# ---- terminals and shell sessions ----


def on_terminal(within: Inside, script: str, user: bytes = b"") -> Done:
    parts = exec_parts("/bin/sh", "-c", script, flags=ExecFlag.TTY, rows=30, columns=100)
    return within.call(OpKind.EXEC, parts, user=user)


@pytest.mark.parametrize("flags", [SpawnFlag(0), SpawnFlag.SETUID], ids=["plain", "setuid"])
async def test_a_terminal_belongs_to_its_user(site: Site, flags: SpawnFlag) -> None:
    script = "busybox tty; busybox stat -c '%u %g %a' $(busybox tty); busybox stty size; echo x > /dev/tty"

    def attempt(within: Inside) -> None:
        for user, owner in ((b"", b"0 0 620"), (b"1000:1001", b"1000 1001 620")):
            done = on_terminal(within, script, user)
            assert (done.outcome, done.code) == (GuestOutcome.EXITED, 0), within.out
            assert within.out.split(b"\r\n") == [b"/dev/pts/0", owner, b"30 100", b"x", b""]

    await inside(site, attempt, flags)


async def test_what_root_does_to_devpts_harms_terminals_only(site: Site) -> None:
    def attempt(within: Inside) -> None:
        within.sh("chmod 0 /dev/pts/ptmx")
        assert on_terminal(within, "true").code == 0
        done = on_terminal(within, "true", b"1000")
        assert (done.outcome, done.code, done.detail) == (GuestOutcome.FAILED, 13, b"tty")
        within.sh("chmod 666 /dev/pts/ptmx")
        within.last += 1
        first = within.last
        for op in range(first, first + 40):
            parts = exec_parts("/bin/sh", "-c", "echo up; exec busybox sleep 100", flags=ExecFlag.TTY)
            within.link.start(op, OpKind.EXEC, parts)
        within.last = first + 39
        results = [within.link.results[op] for op in range(first, first + 40)]
        within.link.until(lambda: all(result.done or result.stdout for result in results))
        failures = [result.done for result in results if result.done]
        assert len(failures) == 40 - 32 and {(done.code, done.detail) for done in failures} == {(28, b"tty")}
        for op in range(first, first + 40):
            within.link.send(encode(FrameType.CANCEL, op))
            within.link.wait(op)
            within.link.forget(op)
        assert on_terminal(within, "true", b"1000").code == 0

    await inside(site, attempt)


async def test_a_shell_session_of_an_ordinary_user(site: Site) -> None:
    def attempt(within: Inside) -> None:
        shell = within.last = within.last + 1
        within.link.start(shell, OpKind.EXEC, exec_parts(flags=ExecFlag.SHELL), user=b"1000:1001")

        def run(command: bytes, timeout_ms: int = 0) -> Done:
            parts = run_parts(shell=shell, timeout_ms=timeout_ms, grace_ms=5000, output_limit=1 << 20, command=command)
            return within.call(OpKind.RUN, parts)

        assert run(b"x=kept; busybox id -u; cd /proc").code == 0
        assert within.out == b"1000\n"
        done = run(b"busybox sleep 100; echo no", timeout_ms=100)
        assert (done.outcome, within.out) == (GuestOutcome.TIMED_OUT, b"") and done.wall_ns < 4_000_000_000
        assert run(b"echo $x $PWD; ls /proc/self/fd").code == 0
        assert within.out.split() == [b"kept", b"/proc", b"0", b"1", b"2", b"3"]
        assert run(b"exit 7").code == 7

    await inside(site, attempt)
