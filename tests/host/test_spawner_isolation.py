"""What a sandbox shows and allows, seen from inside: DESIGN.md's isolation promises, docs/reference/isolation.md.

The programs that look and attack are static C (native/tests), so that they need nothing of an image.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.backends.spawner import NO_FLAGS, SpawnFlag, install_guest
from barchan.wire.guest import OpKind
from tests.host import spawn_site
from tests.host.guest_client import Link, exec_parts
from tests.host.spawn_site import GUEST_UID, NATIVE, UID_COUNT, Box, Site, alive

KEPT = {"chown", "dac_override", "fsetid", "fowner", "kill", "setgid", "setuid", "setpcap", "net_bind_service", "sys_chroot",
        "audit_write", "setfcap"}  # fmt: skip
CAP_NUMBERS = {"chown": 0, "dac_override": 1, "fowner": 3, "fsetid": 4, "kill": 5, "setgid": 6, "setuid": 7, "setpcap": 8,
               "net_bind_service": 10, "sys_chroot": 18, "sys_ptrace": 19, "audit_write": 29, "setfcap": 31}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("spawner")) as made:
        yield made


def mask(names: set[str]) -> int:
    return sum(1 << CAP_NUMBERS[name] for name in names)


async def status(box: Box, uid: int = 0) -> dict[str, str]:
    text = await box.sh("cat /proc/self/status", uid)
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


# ---- what can be seen ----


async def test_nothing_of_the_host_shows(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        cgroups = await box.sh("cat /proc/self/cgroup")
        assert all(line.endswith(":/") for line in cgroups.splitlines()), cgroups
        seen = await box.sh("cat /proc/mounts /proc/self/mountinfo")
        for secret in (str(site.base), box.tree.name + "/u", str(box.uid_base), str(GUEST_UID), ",uid=", ",gid="):
            assert secret not in seen
        assert await box.sh("hostname; cat /proc/sys/kernel/domainname") == "box\n(none)\n"
        assert await box.sh("cat /proc/1/comm /proc/net/unix") != ""
        assert str(box.path) not in await box.sh("cat /proc/net/unix")


async def test_reading_everything_harms_nothing(site: Site) -> None:
    """Every file of /proc and /sys, as root inside, with each read cut short."""
    script = "find /proc /sys -xdev -type f ! -path '/proc/[0-9]*' 2>/dev/null | while read f; do head -c 4096 \"$f\" >/dev/null 2>&1; done"
    async with site.spawner() as spawner, site.box(spawner) as box:
        await box.run("/bin/sh", "-c", script)
        assert await alive(box) == "alive\n"


async def test_masks_are_in_force(site: Site) -> None:
    source = (NATIVE / "sandbox_child.c").read_text()
    files = names(source, "masked_files")
    directories = names(source, "masked_directories")
    assert {"proc/kcore", "proc/kpagecgroup", "proc/sysrq-trigger"} <= files and "sys/fs" in directories
    async with site.spawner() as spawner, site.box(spawner) as box:
        for name in sorted(files):
            assert (await box.run("/bin/cat", f"/{name}")).output.strip() in (
                "",
                f"cat: can't open '/{name}': No such file or directory",
            ), name
            assert (await box.run("/bin/sh", "-c", f"echo x > /{name}")).code != 0, name
        for name in sorted(directories):
            assert (await box.run("/bin/sh", "-c", f"ls -A /{name} 2>/dev/null")).output == "", name
        for path in (
            "/proc/sys/kernel/domainname",
            "/proc/irq/x",
            "/sys/x",
            "/dev/x",
            "/proc/sys/user/max_user_namespaces",
        ):
            refused = await box.run("/bin/sh", "-c", f"echo 1 > {path}")
            assert refused.code != 0 and re.search("Read-only|nonexistent|Permission", refused.output), (path, refused)


def names(source: str, array: str) -> set[str]:
    block = re.search(rf"{array}\[\] = {{(.*?)}};", source, re.DOTALL)
    assert block
    return set(re.findall(r'"([^"]+)"', block[1]))


async def test_devices_work(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        assert ",max=32 " in await box.sh("grep ^devpts /proc/mounts")
        assert (
            await box.sh("cd /dev; echo *") == "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero\n"
        )
        assert await box.sh("head -c 16 /dev/urandom > /r; stat -c %s /r; echo x > /dev/null", uid=0) == "16\n"
        assert (await box.run("/bin/sh", "-c", "echo x > /dev/full")).code != 0
        assert (await box.run("/bin/busybox", "mknod", "/node", "b", "254", "0")).code != 0


async def test_loopback_is_up(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        shown = await box.sh("busybox ifconfig -a")
        assert "addr:127.0.0.1 " in shown and "::1/128" in shown and shown.count("MTU:") == 1


# ---- what may be done ----


async def test_capabilities_are_the_documented_set(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        root, user = await status(box), await status(box, 1000)
        for field in ("CapPrm", "CapEff", "CapBnd"):
            assert int(root[field], 16) == mask(KEPT), field
        for field in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(user[field], 16) == 0, field
        for seen in (root, user):
            assert (seen["NoNewPrivs"], seen["Seccomp"], seen["Seccomp_filters"]) == ("1", "2", "1")


async def test_first_process_runs_under_an_id_outside_the_map(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        host = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{box.child.pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert set(host["Uid"].split()) == set(host["Gid"].split()) == {str(GUEST_UID)}
        assert host["Groups"].strip() == "" and int(host["CapEff"], 16) == mask(KEPT)
        assert Path(f"/proc/{box.child.pid}/uid_map").read_text().split() == ["0", str(box.uid_base), str(UID_COUNT)]
        assert [os.readlink(f"/proc/{box.child.pid}/fd/{fd}") for fd in range(3)] == ["/dev/null"] * 3
        assert sorted(os.listdir(f"/proc/{box.child.pid}/fd")) == ["0", "1", "2", "3", "4"]


async def test_a_request_may_give_the_first_process_an_id_of_its_own(site: Site) -> None:
    async with site.spawner() as spawner:
        for uid in (GUEST_UID + 1, GUEST_UID + 2, 0):
            async with site.box(spawner, guest_uid=uid) as box:
                assert f"Uid:\t{uid or GUEST_UID}\t" in Path(f"/proc/{box.child.pid}/status").read_text()
                assert await box.sh("touch /x; stat -c %u /x") == "0\n"


async def first_line(box: Box, *argv: str) -> str:
    """Of a program that goes on; the box ends it."""
    async with contextlib.aclosing(box.lines(*argv)) as lines:
        return await anext(lines)


async def test_sandboxes_with_owners_of_their_own_do_not_use_up_each_others_inotify(site: Site) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    async with site.spawner() as spawner:
        async with (
            site.box(spawner, guest_uid=GUEST_UID + 1) as one,
            site.box(spawner, guest_uid=GUEST_UID + 2) as other,
        ):
            assert int(await first_line(one, "/bin/hold_inotify")) == limit
            assert int(await first_line(other, "/bin/hold_inotify")) == limit
        async with site.box(spawner) as one, site.box(spawner) as other:
            assert int(await first_line(one, "/bin/hold_inotify")) == limit
            assert int(await first_line(other, "/bin/hold_inotify")) == 0, (
                "shared after all: drop the note in isolation.md"
            )


async def test_set_user_id_programs_work_only_on_request(site: Site) -> None:
    async with site.spawner() as spawner:
        for flags, seen in ((SpawnFlag.SETUID, "1000 0\n"), (NO_FLAGS, "1000 1000\n")):
            async with site.box(spawner, flags) as box:
                await box.sh("cp /bin/show_ids /su; chmod 4755 /su")
                assert await box.sh("/su", uid=1000) == seen
                assert (await status(box))["NoNewPrivs"] == ("0" if flags else "1")


async def test_nested_user_namespaces_are_refused_twice(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        assert (await box.run("/bin/unshare", "-U", "true")).code != 0
        assert await box.sh("cat /proc/sys/user/max_*_namespaces") == "0\n" * 8


PERM, NOSYS, NOFAMILY = errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT
ANSWERS = {
    **dict.fromkeys(
        ["mount", "umount2", "pivot_root", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "mount_setattr", "open_by_handle_at", "setns", "bpf", "perf_event_open", "userfaultfd", "fanotify_init", "io_uring_setup", "keyctl", "add_key", "request_key", "kexec_load", "init_module", "finit_module", "delete_module", "swapon", "swapoff", "reboot", "settimeofday", "clock_settime", "acct", "quotactl", "mbind", "syslog", "sethostname", "unshare_user", "unshare_mount", "unshare_time", "clone_user", "clone_pid", "modify_ldt", "ioctl_tiocsti", "ioctl_tiocsti_high", "ioctl_tioclinux", "ioctl_tioclinux_high", "ioctl_fifreeze", "ioctl_fifreeze_high", "ioctl_fithaw", "ioctl_fithaw_high", "ioctl_xfs_swapext", "ioctl_xfs_swapext_high", "ioctl_btrfs_subvolume", "ioctl_btrfs_subvolume_high", "ioctl_setflags", "ioctl_setflags_high", "socket_raw"], PERM),
    **dict.fromkeys([f"ioctl_{name}{high}" for name in ("tiocsetd", "siocgifbr", "siocsifbr", "siocbraddbr", "siocbrdelbr", "siocgifvlan", "siocsifvlan") for high in ("", "_high")], PERM),
    **dict.fromkeys(["clone3", "unknown", "io_setup", "io_submit", "personality_read_exec"], NOSYS),
    **dict.fromkeys(["socket_packet", "socket_key", "socket_alg", "socket_vsock", "socket_vsock_high", "socket_alg_high", "socket_route", "socket_audit", "socketpair_inet", "socketpair_vsock"], NOFAMILY),
    "socketpair_unix": errno.EFAULT,
    **dict.fromkeys(["unshare_files", "personality_query", "personality_no_random", "socket_unix", "socket_inet", "socket_inet_high", "socket_inet6"], 0),
    "ioctl_other": errno.EBADF,
    "ioctl_fsgetxattr": errno.EBADF,
    "ioctl_xfs_exchange": PERM,
    "abi_x32": -signal.SIGSYS,
    "abi_i386": -signal.SIGSYS,
}  # fmt: skip
INTERNET = {1000, 1006, 2000, 2017}
"""Type * 1000 + protocol: streams are TCP, datagrams are UDP."""
LISTS = {
    "protocols_2": INTERNET,
    "protocols_10": INTERNET,
    "options_0": set(range(35, 49)),
    "options_1": set(),
    "options_6": {14, 31, 32, *range(38, 43)},
    "options_17": set(),
    "options_41": {20, 21, 27, 28, 32, *range(42, 49)},
}
"""Options: those that are refused."""
DEBUGGING = {"process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "ptrace"}


@pytest.mark.parametrize(
    "flags", [NO_FLAGS, SpawnFlag.PTRACE, SpawnFlag.SETUID], ids=["plain", "ptrace", "set-user-id"]
)
async def test_seccomp_answers(site: Site, flags: SpawnFlag) -> None:
    async with site.spawner(site.guest("guest")) as spawner, site.box(spawner, flags) as box:
        output = await asyncio.to_thread(run_in_guest, box.path, b"", "/bin/seccomp_answers")
    lines = {name: value for name, _, value in (line.partition(" ") for line in output.splitlines())}
    assert {name: {int(number) for number in lines.pop(name).split(",")[:-1]} for name in LISTS} == LISTS
    answers = {name: int(value) for name, value in lines.items()}
    debugging = {name: answers.pop(name) for name in DEBUGGING}
    assert answers == ANSWERS
    if flags & SpawnFlag.PTRACE:
        assert PERM not in debugging.values() and NOSYS not in debugging.values()
    else:
        assert set(debugging.values()) == {PERM}


# ---- PID 1 ----

HARD = SpawnFlag.ALL_CAPS | SpawnFlag.PTRACE
OWN_PRIORITY = {
    "prlimit_get",
    "prlimit_set",
    "setpriority",
    "sched_setaffinity",
    "sched_setscheduler",
    "timerslack",
    "ioprio_set",
}
"""What SYS_RESOURCE and SYS_NICE open; neither is in our set."""


async def attack(box: Box) -> dict[str, str]:
    result = await box.run("/bin/attack_pid1")
    assert result.code == 0, result
    verdicts = result.lines()
    assert len(verdicts) > 60 and verdicts.pop("signals") == "sent"
    return verdicts


def reached(verdicts: dict[str, str]) -> set[str]:
    return {name for name, verdict in verdicts.items() if not verdict.startswith("refused")}


@pytest.mark.parametrize("flags", [NO_FLAGS, SpawnFlag.PTRACE, HARD], ids=["plain", "ptrace", "all-capabilities"])
async def test_pid1_cannot_be_reached(site: Site, flags: SpawnFlag) -> None:
    async with site.spawner() as spawner, site.box(spawner, flags) as box:
        assert reached(await attack(box)) <= (OWN_PRIORITY if flags == HARD else set())
        assert await alive(box) == "alive\n"


async def test_control_a_readable_guest_is_reached(site: Site, tmp_path: Path) -> None:
    """The attack can succeed: with mode 0755 the memory of PID 1 belongs to the sandbox's user namespace."""
    guest = install_guest(NATIVE / "build" / "probe_guest", tmp_path)
    guest.chmod(0o755)
    async with site.spawner(guest) as spawner, site.box(spawner, HARD) as box:
        verdicts = {}
        async with contextlib.aclosing(box.lines("/bin/attack_pid1")) as lines:
            async for name, _, verdict in (line.partition(" ") async for line in lines):
                verdicts[name] = verdict
                if name == "process_vm_readv":  # what follows would stop PID 1, and with it the output
                    break
        assert reached(verdicts) >= {"/proc/1/maps", "/proc/1/root", "process_vm_readv"}


# ---- the real guest ----


def run_in_guest(path: Path, user: bytes, *argv: str) -> str:
    """One program through the guest protocol, on a connection of its own."""
    link = Link(str(path))
    try:
        operation = link.hello().last + 1
        result = link.start(operation, OpKind.EXEC, exec_parts(*argv), user=user)
        done = link.wait(operation)
        assert (done.outcome, done.code) == (0, 0), (done, result.stderr)
        link.forget(operation)
        return result.stdout.decode()
    finally:
        link.close()


def fields(text: str) -> dict[str, str]:
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


async def test_programs_of_the_real_guest_have_the_documented_capabilities(site: Site) -> None:
    async with site.spawner(site.guest("guest")) as spawner, site.box(spawner) as box:
        root = fields(await asyncio.to_thread(run_in_guest, box.path, b"", "/bin/cat", "/proc/self/status"))
        user = fields(await asyncio.to_thread(run_in_guest, box.path, b"1000", "/bin/cat", "/proc/self/status"))
    assert {int(root[field], 16) for field in ("CapPrm", "CapEff", "CapBnd")} == {mask(KEPT)}
    assert {int(user[field], 16) for field in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert [seen["Uid"].split()[1] for seen in (root, user)] == ["0", "1000"]
    for seen in (root, user):  # the sandbox's filter and the program's own
        assert (seen["NoNewPrivs"], seen["Seccomp"], seen["Seccomp_filters"]) == ("1", "2", "2")


async def test_the_first_process_shows_no_digest(site: Site) -> None:
    async with site.spawner(site.guest("guest")) as spawner, site.box(spawner) as box:
        assert await asyncio.to_thread(run_in_guest, box.path, b"", "/bin/cat", "/proc/1/comm") == "init\n"


@pytest.mark.parametrize("flags", [NO_FLAGS, SpawnFlag.SETUID], ids=["clone3", "moved"])
async def test_both_ways_into_a_group(site: Site, flags: SpawnFlag) -> None:
    """Where the guest may call clone3 a program is born in its group; otherwise it moves there."""
    async with site.spawner(site.guest("guest")) as spawner, site.box(spawner, flags) as box:
        shown = await asyncio.to_thread(run_in_guest, box.path, b"1000", "/bin/grep", "^0:", "/proc/self/cgroup")
        assert re.fullmatch(r"0::/x\d+\n", shown)


@pytest.mark.parametrize("flags", [NO_FLAGS, HARD], ids=["plain", "all-capabilities"])
async def test_the_real_guest_cannot_be_reached(site: Site, flags: SpawnFlag) -> None:
    async with site.spawner(site.guest("guest")) as spawner, site.box(spawner, flags) as box:
        output = await asyncio.to_thread(run_in_guest, box.path, b"", "/bin/attack_pid1")
        verdicts = {name: verdict for name, _, verdict in (line.partition(" ") for line in output.splitlines())}
        assert verdicts.pop("signals") == "sent" and len(verdicts) > 60
        assert reached(verdicts) <= (OWN_PRIORITY if flags else set())
        assert await asyncio.to_thread(run_in_guest, box.path, b"1000", "/bin/cat", "/lower/mine") == "uid 1000's\n"
