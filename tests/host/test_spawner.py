"""The spawner and what it makes: isolation seen from inside, ids seen from outside, failures by name."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import resource
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.backends.spawner import NO_FLAGS, TIMES, SpawnFlag, Spawner, install_guest
from barchan.errors import CreateFailed
from barchan.kernel import syscalls
from tests.host import spawn_site
from tests.host.spawn_site import GUEST_UID, NATIVE, UID_COUNT, Box, Site

KEPT = {"chown", "dac_override", "fsetid", "fowner", "kill", "setgid", "setuid", "setpcap", "net_bind_service", "sys_chroot",
        "audit_write", "setfcap"}  # fmt: skip
CAP_NUMBERS = {"chown": 0, "dac_override": 1, "fowner": 3, "fsetid": 4, "kill": 5, "setgid": 6, "setuid": 7, "setpcap": 8,
               "net_bind_service": 10, "sys_chroot": 18, "sys_ptrace": 19, "audit_write": 29, "setfcap": 31}  # fmt: skip
BOTH_WAYS = pytest.mark.parametrize(
    "flags", [SpawnFlag.VOLATILE, SpawnFlag.VOLATILE | SpawnFlag.REDUCED], ids=["by-fd", "reduced"]
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("spawner")) as made:
        yield made


def mask(names: set[str]) -> int:
    return sum(1 << CAP_NUMBERS[name] for name in names)


async def status(box: Box, uid: int = 0) -> dict[str, str]:
    text = await box.sh("cat /proc/self/status", uid)
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


async def reply_time(box: Box) -> str:
    """It lives: an answer within the time limit."""
    return await asyncio.wait_for(box.sh("echo alive"), 10)


# ---- files ----


@BOTH_WAYS
async def test_files_belong_to_root_inside_and_to_canonical_ids_on_the_scratch(site: Site, flags: SpawnFlag) -> None:
    async with site.spawner() as spawner, site.box(spawner, flags) as box:
        assert (
            await box.sh("echo new > /new; stat -c '%u:%g' /new /lower/file /lower/mine /dev/null")
            == "0:0\n0:0\n1000:1000\n0:0\n"
        )
        await box.sh("touch /tmp/theirs", uid=1000)
        assert await box.sh("stat -c %u /tmp/theirs") == "1000\n"
        scratch = (box.tree / "u" / "new").stat(), (box.tree / "u" / "tmp" / "theirs").stat()
        assert [(f.st_uid, f.st_gid) for f in scratch] == [(0, 0), (1000, 1000)]


@BOTH_WAYS
async def test_the_layer_is_changed_only_in_the_writable_tree(site: Site, flags: SpawnFlag) -> None:
    async with site.spawner() as spawner, site.box(spawner, flags) as box:
        await box.sh("rm /lower/file; mv /lower /renamed; echo more >> /renamed/mine")
        assert await box.sh("ls /renamed; cat /renamed/mine") == "mine\nuid 1000's\nmore\n"
        whiteout = (box.tree / "u" / "lower").stat()
        assert os.major(whiteout.st_rdev) == os.minor(whiteout.st_rdev) == 0
        assert (site.layer_path / "lower" / "file").read_text() == "from the layer\n"


@BOTH_WAYS
async def test_layers_are_stacked_top_first(site: Site, flags: SpawnFlag, tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "lower").mkdir(parents=True)
    (top / "lower" / "file").write_text("from the top\n")
    extra = syscalls.open_tree(top, clone=True)
    try:
        async with site.spawner() as spawner:
            async with site.box(spawner, flags) as plain:
                assert await plain.sh("cat /lower/file") == "from the layer\n"
            async with site.box(spawner, flags, above=(extra,)) as box:
                assert await box.sh("cat /lower/file /lower/mine") == "from the top\nuid 1000's\n"
    finally:
        os.close(extra)


async def test_a_link_in_place_of_proc_is_refused(site: Site, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "proc").symlink_to("/tmp")
    layer = syscalls.open_tree(evil, clone=True)
    try:
        async with site.spawner() as spawner:
            with site.request(layers=(layer,)) as (request, *_), pytest.raises(CreateFailed) as failure:
                await spawner.spawn(request)
        assert failure.value.phase == "proc"
    finally:
        os.close(layer)


async def test_shared_memory_has_its_size(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner, shm_bytes=1 << 20) as box:
        full = await box.run("/bin/dd", "if=/dev/zero", "of=/dev/shm/x", "bs=64k", "count=64", uid=1000)
        assert full.code and "No space left" in full.output


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
        assert await reply_time(box) == "alive\n"


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
    block = re.search(rf"{array}\[\] = {{(.*?)}};", source, re.S)
    assert block
    return set(re.findall(r'"([^"]+)"', block[1]))


async def test_devices_work(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        assert (
            await box.sh("cd /dev; echo *") == "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero\n"
        )
        assert await box.sh("head -c 16 /dev/urandom > /r; stat -c %s /r; echo x > /dev/null", uid=0) == "16\n"
        assert (await box.run("/bin/sh", "-c", "echo x > /dev/full")).code != 0
        assert (await box.run("/bin/busybox", "mknod", "/node", "b", "254", "0")).code != 0


async def test_loopback_is_up(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        shown = await box.sh("ip addr")
        assert "127.0.0.1/8" in shown and "::1/128" in shown and shown.count("mtu") == 1


# ---- what may be done ----


async def test_capabilities_are_the_documented_set(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        root, user = await status(box), await status(box, 1000)
        for field in ("CapPrm", "CapEff", "CapBnd"):
            assert int(root[field], 16) == mask(KEPT), field
        for field in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(user[field], 16) == 0, field
        for seen in (root, user):
            assert (seen["NoNewPrivs"], seen["Seccomp"], seen["Seccomp_filters"]) == ("1", "2", "2")


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
        assert Path(f"/proc/{box.child.pid}/oom_score_adj").read_text() == "500\n"


async def test_a_request_may_give_the_first_process_an_id_of_its_own(site: Site) -> None:
    async with site.spawner() as spawner:
        for uid in (GUEST_UID + 1, GUEST_UID + 2, 0):
            async with site.box(spawner, guest_uid=uid) as box:
                assert f"Uid:\t{uid or GUEST_UID}\t" in Path(f"/proc/{box.child.pid}/status").read_text()
                assert await box.sh("touch /x; stat -c %u /x") == "0\n"


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


PERM, NOSYS, NOFAMILY, NOPROTO = errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT
ANSWERS = {
    **dict.fromkeys(
        "mount umount2 pivot_root open_tree move_mount fsopen fsconfig fsmount mount_setattr open_by_handle_at setns bpf "
        "perf_event_open userfaultfd fanotify_init io_uring_setup keyctl add_key request_key kexec_load init_module "
        "finit_module delete_module swapon swapoff reboot settimeofday clock_settime acct quotactl syslog sethostname "
        "unshare_user unshare_mount unshare_time clone_user clone_pid modify_ldt ioctl_tiocsti ioctl_tiocsti_high "
        "ioctl_tioclinux ioctl_tioclinux_high ioctl_fifreeze ioctl_fifreeze_high ioctl_fithaw ioctl_fithaw_high "
        "ioctl_xfs_swapext ioctl_xfs_swapext_high ioctl_btrfs_subvolume ioctl_btrfs_subvolume_high ioctl_setflags "
        "ioctl_setflags_high socket_raw".split(), PERM),
    **dict.fromkeys("clone3 unknown personality_read_exec".split(), NOSYS),
    **dict.fromkeys("socket_packet socket_key socket_alg socket_vsock socket_vsock_high socket_alg_high".split(), NOFAMILY),
    "socket_audit": NOPROTO,
    **dict.fromkeys("unshare_files personality_query personality_no_random socket_unix socket_inet socket_inet6 socket_route".split(), 0),
    "ioctl_other": errno.EBADF,
    "abi_x32": -signal.SIGSYS,
    "abi_i386": -signal.SIGSYS,
}  # fmt: skip
DEBUGGING = {"process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "ptrace"}


@pytest.mark.parametrize("flags", [NO_FLAGS, SpawnFlag.PTRACE], ids=["plain", "ptrace"])
async def test_seccomp_answers(site: Site, flags: SpawnFlag) -> None:
    async with site.spawner() as spawner, site.box(spawner, flags) as box:
        answers = {name: int(value) for name, value in (await box.run("/bin/seccomp_answers")).lines().items()}
    debugging = {name: answers.pop(name) for name in DEBUGGING}
    assert answers == ANSWERS
    if flags:
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
        assert await reply_time(box) == "alive\n"


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


# ---- life and death ----


async def test_containers_outlive_the_spawner(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        os.kill(spawner.pid, signal.SIGKILL)
        with site.request() as (request, *_), pytest.raises(CreateFailed) as failure:
            await spawner.spawn(request)
        assert failure.value.phase == "spawner" and not spawner.alive
        assert await reply_time(box) == "alive\n"


async def test_pending_spawns_fail_when_the_spawner_dies(site: Site) -> None:
    async with site.spawner() as spawner:
        os.kill(spawner.pid, signal.SIGSTOP)
        with site.request() as (one, *_), site.request() as (two, *_):
            pending = [asyncio.ensure_future(spawner.spawn(request)) for request in (one, two)]
            await asyncio.sleep(0)
            os.kill(spawner.pid, signal.SIGKILL)
            failures = await asyncio.gather(*pending, return_exceptions=True)
        assert [getattr(failure, "phase", failure) for failure in failures] == ["spawner", "spawner"]


async def test_the_spawner_ends_with_its_link(site: Site) -> None:
    async with site.spawner() as spawner:
        pidfd = os.pidfd_open(spawner.pid)
    try:
        await spawn_site.ended(pidfd)
        assert not spawner.alive
    finally:
        os.close(pidfd)


async def test_many_at_once_all_come_out_right(site: Site) -> None:
    async with site.spawner() as spawner:

        async def one() -> str:
            async with site.box(spawner) as box:
                return await box.sh("echo $$ > /own; cat /own; stat -c %u /own")

        assert await asyncio.gather(*(one() for _ in range(40))) == ["2\n0\n"] * 40


async def test_a_cancelled_spawn_leaves_no_process(site: Site) -> None:
    async with site.spawner() as spawner:
        with site.request() as (request, _, _, group):
            os.kill(spawner.pid, signal.SIGSTOP)
            task = asyncio.ensure_future(spawner.spawn(request))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            os.kill(spawner.pid, signal.SIGCONT)
            async with site.box(spawner):  # answered after the cancelled one
                await empty(group)


async def empty(group: Path) -> None:
    """Waits for the kernel's notice that the last process of the group is gone."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    fd = os.open(group / "cgroup.events", os.O_RDONLY)
    poller = select.epoll()
    poller.register(fd, select.EPOLLPRI)
    loop.add_reader(poller.fileno(), changed.set)
    try:
        while "populated 0" not in os.pread(fd, 100, 0).decode():
            await asyncio.wait_for(changed.wait(), 10)
            poller.poll(0)
            changed.clear()
    finally:
        loop.remove_reader(poller.fileno())
        poller.close()
        os.close(fd)


@pytest.mark.parametrize(
    ("field", "path", "phase"),
    [
        ("layers", "/dev/null", "layer-idmap"),
        ("writable", "/dev/null", "writable-idmap"),
        ("cgroup", "/dev/null", "clone"),
        ("groups", "/dev/full", "cgroup"),
    ],
)
async def test_a_bad_descriptor_is_named_and_leaves_nothing(site: Site, field: str, path: str, phase: str) -> None:
    bad = os.open(path, os.O_RDWR)
    try:
        async with site.spawner() as spawner:
            value = (bad,) if field in ("layers", "groups") else bad
            with site.request(**{field: value}) as (request, _, _, group):
                with pytest.raises(CreateFailed) as failure:
                    await spawner.spawn(request)
                await empty(group)
            assert failure.value.phase == phase and failure.value.party == "node"
            async with site.box(spawner) as box:
                assert await reply_time(box) == "alive\n"
    finally:
        os.close(bad)


@BOTH_WAYS
async def test_a_tree_that_the_sandbox_cannot_write_is_found_before_it_starts(site: Site, flags: SpawnFlag) -> None:
    async with site.spawner() as spawner:
        with site.request(flags=flags) as (request, _, tree, group):
            for name in "uw":
                os.chown(tree / name, 5_000_000, 5_000_000)
            with pytest.raises(CreateFailed) as failure:
                await spawner.spawn(request)
            await empty(group)
        assert failure.value.phase in ("overlay-readonly", "overlay-create"), failure.value


async def test_a_missing_tree_is_named(site: Site) -> None:
    async with site.spawner() as spawner:
        with site.request() as (request, _, tree, _):
            (tree / "w").rmdir()
            with pytest.raises(CreateFailed, match="ENOENT") as failure:
                await spawner.spawn(request)
        assert failure.value.phase == "overlay-upper" and "u and w" in failure.value.hint


async def test_a_used_layer_descriptor_is_refused(site: Site) -> None:
    async with site.spawner() as spawner:
        with site.request() as (first, *_), site.request(layers=first.layers) as (second, *_):
            child = await spawner.spawn(first)
            try:
                with pytest.raises(CreateFailed) as failure:
                    await spawner.spawn(second)
                assert failure.value.phase == "layer-idmap"
            finally:
                await spawn_site.end(child)


async def test_a_guest_that_cannot_run_is_named(site: Site, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF, but not really")
    async with site.spawner(install_guest(broken, tmp_path / "g")) as spawner:
        with site.request() as (request, *_), pytest.raises(CreateFailed, match="ENOEXEC") as failure:
            await spawner.spawn(request)
    assert failure.value.phase == "exec"


async def test_ids_that_reach_pid1_are_refused(site: Site) -> None:
    async with site.spawner() as spawner:
        with (
            site.request(uid_base=GUEST_UID - 5) as (request, *_),
            pytest.raises(CreateFailed, match="EINVAL") as failure,
        ):
            await spawner.spawn(request)
        assert failure.value.phase == "request"


async def test_a_host_name_that_does_not_fit_is_refused(site: Site) -> None:
    async with site.spawner() as spawner:
        for name in ("", "x" * 64, "a\0b"):
            with site.request(hostname=name) as (request, *_), pytest.raises(CreateFailed):
                await spawner.spawn(request)


async def test_a_missing_binary_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(CreateFailed) as failure:
        async with Spawner.start(tmp_path / "none", tmp_path / "none", GUEST_UID):
            pass
    assert failure.value.phase == "spawner"


async def test_nothing_leaks_in_the_spawner(site: Site) -> None:
    async with site.spawner() as spawner:
        async with site.box(spawner):
            before = sorted(os.listdir(f"/proc/{spawner.pid}/fd"))
        mounts = Path(f"/proc/{spawner.pid}/mountinfo").read_text()
        for flags in (NO_FLAGS, SpawnFlag.REDUCED):
            async with site.box(spawner, flags):
                pass
        bad = os.open("/dev/null", os.O_RDWR)
        with site.request(layers=(bad,), flags=SpawnFlag.REDUCED) as (request, *_), pytest.raises(CreateFailed):
            await spawner.spawn(request)
        os.close(bad)
        assert sorted(os.listdir(f"/proc/{spawner.pid}/fd")) == before
        assert Path(f"/proc/{spawner.pid}/mountinfo").read_text() == mounts


# ---- network namespace from a pool ----


async def test_a_given_network_namespace_is_used(site: Site, tmp_path: Path) -> None:
    netns = new_network()
    try:
        async with site.spawner() as spawner, site.box(spawner, netns=netns) as box:
            there = os.stat(f"/proc/{box.child.pid}/ns/net")
            assert there.st_ino == os.fstat(netns).st_ino
            assert "ls" not in await box.sh("ls /sys/class/net")
            assert (await box.run("/bin/ip", "link", "set", "lo", "up")).code != 0
    finally:
        os.close(netns)


def new_network() -> int:
    """A network namespace of the host's user namespace, made in a thread that ends."""
    import threading

    made: list[int] = []

    def make() -> None:
        if syscalls._libc.unshare(0x40000000):
            raise syscalls.oserror("unshare")
        made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


# ---- speed ----


def test_times_are_named() -> None:
    assert len(TIMES) == 8


def test_limits_of_this_test() -> None:
    """40 sandboxes at once need descriptors: say so here and not in the middle."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 512
    assert socket.SOCK_SEQPACKET
