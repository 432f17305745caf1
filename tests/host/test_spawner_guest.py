"""The real guest in a sandbox whose programs do what they can against it: hostile account files, no memory left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.backends.spawner import SpawnFlag
from barchan.wire.guest import GuestOutcome
from tests.host import spawn_site
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
        for user, shown in ((b"", "0 0"), (b"0", "0 0"), (b"1000", "1000 0"), (b"1000:1001", "1000 1001")):
            done = within.program("/bin/grep", "-E", "^[UG]id:", "/proc/self/status", user=user)
            assert (done.outcome, b" ".join(within.out.split()[1::5]).decode()) == (GuestOutcome.EXITED, shown), done
        for user in (b"nobody", b"0:nogroup"):
            done = within.program("/bin/true", user=user)
            assert (done.outcome, done.detail) == (GuestOutcome.FAILED, b"user") and done.code != 0

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
