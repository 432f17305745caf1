"""The spawner and what it makes: isolation seen from inside, ids seen from outside, failures by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from barchan.backends.spawner import NO_FLAGS, Spawned, Spawner, SpawnFlag, install_guest
from barchan.errors import CreateFailed
from barchan.kernel import syscalls
from tests.host import spawn_site
from tests.host.spawn_site import GUEST_UID, Site, alive

BOTH_WAYS = pytest.mark.parametrize(
    "flags", [SpawnFlag.VOLATILE, SpawnFlag.VOLATILE | SpawnFlag.REDUCED], ids=["by-fd", "reduced"]
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with spawn_site.open_site(tmp_path_factory.mktemp("spawner")) as made:
        yield made


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
        await box.sh("chown 7 /lower/mine; rm /lower/file; mv /lower /renamed; echo more >> /renamed/mine")
        assert await box.sh("ls /renamed; cat /renamed/mine; stat -c %u /renamed/mine") == "mine\nuid 1000's\nmore\n7\n"
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


# ---- life and death ----


async def test_containers_outlive_the_spawner(site: Site) -> None:
    async with site.spawner() as spawner, site.box(spawner) as box:
        os.kill(spawner.pid, signal.SIGKILL)
        with site.request() as (request, *_), pytest.raises(CreateFailed) as failure:
            await spawner.spawn(request)
        assert failure.value.phase == "spawner" and not spawner.alive
        assert await alive(box) == "alive\n"


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


async def test_more_at_once_than_it_takes_all_come_out_right(site: Site) -> None:
    """64 are in the making at most (SPAWN_IN_FLIGHT); the rest wait in the socket."""
    async with site.spawner() as spawner:

        async def one() -> str:
            async with site.box(spawner) as box:
                return await box.sh("echo $$ > /own; cat /own; stat -c %u /own")

        assert await asyncio.gather(*(one() for _ in range(80))) == ["2\n0\n"] * 80


async def test_it_ends_in_order_while_every_slot_is_taken(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        requests = [stack.enter_context(site.request())[0] for _ in range(70)]
        async with site.spawner() as spawner:
            pending = [asyncio.ensure_future(spawner.spawn(request)) for request in requests]
            first, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        outcomes = await asyncio.gather(*pending, return_exceptions=True)
        assert spawner.returncode == 0
        assert first
        for outcome in outcomes:
            if isinstance(outcome, Spawned):
                await spawn_site.end(outcome)
            else:
                assert isinstance(outcome, CreateFailed) and outcome.phase == "spawner"


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


def populated(group: Path) -> bool:
    return "populated 1" in (group / "cgroup.events").read_text()


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
                assert not populated(group)
            assert failure.value.phase == phase and failure.value.party == "node"
            async with site.box(spawner) as box:
                assert await alive(box) == "alive\n"
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
            assert not populated(group)
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


def test_a_guest_that_was_made_readable_is_installed_again(site: Site, tmp_path: Path) -> None:
    source = site.guest()
    installed = install_guest(source, tmp_path)
    assert installed.stat().st_mode & 0o7777 == 0o111
    installed.chmod(0o755)
    assert install_guest(source, tmp_path) == installed
    assert installed.stat().st_mode & 0o7777 == 0o111


def test_it_works_and_closes_under_uvloop(site: Site) -> None:
    """uvloop aborts the process when a watched descriptor is closed."""

    async def one() -> str:
        async with site.spawner() as spawner, site.box(spawner) as box:
            os.kill(spawner.pid, signal.SIGKILL)
            return await alive(box)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(one()) == "alive\n"


@BOTH_WAYS
async def test_sanitizers_find_nothing(site: Site, flags: SpawnFlag) -> None:
    """Success, failures early and late, more at once: the spawner under ASan and UBSan, which end it at a finding."""
    async with site.spawner(binary="spawner_sanitized") as spawner:
        bad = os.open("/dev/full", os.O_RDWR)
        for changes in ({"layers": (bad,)}, {"cgroup": bad}, {"groups": (bad,) * 8}, {"uid_base": GUEST_UID}):
            with site.request(flags=flags, **changes) as (request, *_), pytest.raises(CreateFailed):
                await spawner.spawn(request)
        os.close(bad)

        async def one() -> str:
            async with site.box(spawner, flags) as box:
                return await alive(box)

        assert await asyncio.gather(*(one() for _ in range(8))) == ["alive\n"] * 8
    assert spawner.returncode == 0


async def test_a_missing_binary_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(CreateFailed) as failure:
        async with Spawner.start(tmp_path / "none", tmp_path / "none", GUEST_UID):
            pass
    assert failure.value.phase == "spawner"


async def idle(spawner: Spawner) -> None:
    """Until it waits for requests: an answer comes before the last descriptors are closed."""

    async def watch() -> None:
        while "poll" not in Path(f"/proc/{spawner.pid}/wchan").read_text():
            await asyncio.sleep(0)

    await asyncio.wait_for(watch(), 10)


async def test_nothing_leaks_in_the_spawner(site: Site) -> None:
    async with site.spawner() as spawner:
        async with site.box(spawner):
            await idle(spawner)
            before = sorted(os.listdir(f"/proc/{spawner.pid}/fd"))
        mounts = Path(f"/proc/{spawner.pid}/mountinfo").read_text()
        for flags in (NO_FLAGS, SpawnFlag.REDUCED):
            async with site.box(spawner, flags):
                pass
        bad = os.open("/dev/null", os.O_RDWR)
        with site.request(layers=(bad,), flags=SpawnFlag.REDUCED) as (request, *_), pytest.raises(CreateFailed):
            await spawner.spawn(request)
        os.close(bad)
        await idle(spawner)
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
    made: list[int] = []

    def make() -> None:
        if syscalls._libc.unshare(0x40000000):
            raise syscalls.oserror("unshare")
        made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
