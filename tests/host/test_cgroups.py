"""Control groups on this host's real hierarchies, below a parent of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.kernel import cgroups, groups
from barchan.kernel.cgroups import GroupTree
from barchan.kernel.groups import Group
from barchan.spec import MIB, Limits

OWNER = 0x30000000 - 1
SOCKETS = """
import select, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
most, queued, idle, open_ = int(sys.argv[1]), 0, 0, []
while queued < most and len(open_) < 100:
    out = socket.create_connection(listener.getsockname())
    open_ += [out, listener.accept()[0]]
    out.setblocking(False)
    while queued < most and select.select([], [out], [], 0.02)[1]:
        queued += out.send(bytes(65536))
print(queued, flush=True)
sys.stdin.read()
"""
LIMITS = Limits(memory=64 * MIB, cpus=0.5, pids=20)
HOG = "b = bytearray(200 << 20)"
BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


@pytest.fixture
def tree() -> Iterator[GroupTree]:
    if os.geteuid():
        pytest.skip("control groups need root")
    tree = GroupTree(cgroups.detect(), f"barchan-groups-{os.getpid()}")
    tree.prepare()
    try:
        yield tree
    finally:
        for sandbox in tree.list():
            tree.destroy(sandbox)
        tree.close()


def paths(tree: GroupTree) -> list[Path]:
    return [tree.unified, *tree.v1.values()]


def start(group: Group, *argv: str, pipes: int | None = None) -> subprocess.Popen[bytes]:
    """A program that is in all groups from its first instruction: the shell joins them and becomes it."""
    files = [path / "cgroup.procs" for path in (group.unified, *group.v1.values())]
    join = "".join(f"echo $$ >{file}; " for file in files)
    return subprocess.Popen(["sh", "-c", join + 'exec "$@"', "sh", *argv], stdin=pipes, stdout=pipes)


def started(group: Group) -> subprocess.Popen[bytes]:
    """`sleep` in the groups, seen there."""
    child = subprocess.Popen(["sleep", "1000"])
    for path in (group.unified, *group.v1.values()):
        (path / "cgroup.procs").write_text(str(child.pid))
    return child


def read(path: Path, name: str) -> str:
    return (path / name).read_text().strip()


def test_limits_are_what_the_kernel_says(tree: GroupTree) -> None:
    with tree.make("a", LIMITS, OWNER) as group:
        memory = group.v1.get("memory")
        if memory:
            assert int(read(memory, "memory.limit_in_bytes")) == LIMITS.memory
        else:
            assert int(read(group.unified, "memory.max")) == LIMITS.memory
        cpu = group.v1.get("cpu")
        if cpu:
            assert int(read(cpu, "cpu.cfs_quota_us")) * 2 == int(read(cpu, "cpu.cfs_period_us"))
        else:
            assert read(group.unified, "cpu.max") == "50000 100000"
        assert read(group.v1.get("pids", group.unified), "pids.max") == "20"


@pytest.mark.parametrize("sizes", [(64, 32), (32, 64)])
def test_making_again_changes_the_limits(tree: GroupTree, sizes: tuple[int, int]) -> None:
    """Also below and above the old value, where v1 wants its two limits written in another order."""
    for size in sizes:
        with tree.make("a", Limits(memory=size * MIB), OWNER) as group:
            path, name = group.v1.get("memory"), "memory.limit_in_bytes"
            assert int(read(path or group.unified, name if path else "memory.max")) == size * MIB


@pytest.mark.parametrize(("memory", "most"), [(8, 4), (64, 16)])
def test_socket_buffers_have_a_limit_of_their_own(tree: GroupTree, memory: int, most: int) -> None:
    with tree.make("a", Limits(memory=memory * MIB), OWNER) as group:
        assert int(read(counted_sockets(group), "memory.kmem.tcp.limit_in_bytes")) == most * MIB


@pytest.mark.parametrize(("memory", "fits"), [(64, False), (1024, True)])
def test_socket_buffers_stop_at_their_limit(tree: GroupTree, memory: int, fits: bool) -> None:
    """But for some 70 KiB that the kernel grants to each connection; the larger limit is the control."""
    limits = Limits(memory=memory * MIB)
    with tree.make("a", limits, OWNER) as group:
        path = counted_sockets(group)
        with start(group, sys.executable, "-c", SOCKETS, str(64 * MIB), pipes=subprocess.PIPE) as child:
            assert child.stdout
            queued = int(child.stdout.readline())
            charged = int(read(path, "memory.kmem.tcp.usage_in_bytes"))
            group.kill()
        assert (queued >= 64 * MIB) == fits
        assert (charged < groups.socket_memory(limits) * 1.5) or fits
        assert (charged > 64 * MIB) == fits


def counted_sockets(group: Group) -> Path:
    path = group.v1.get("memory")
    if path is None or not (path / "memory.kmem.tcp.limit_in_bytes").exists():
        pytest.skip("this kernel counts socket buffers in the memory limit")
    return path


def test_groups_are_closed_to_others_whatever_the_umask(tree: GroupTree) -> None:
    for umask in (0, 0o777):
        old = os.umask(umask)
        try:
            tree.make("a", LIMITS, OWNER).close()
        finally:
            os.umask(old)
        for parent in paths(tree):
            assert (parent.stat().st_uid, parent.stat().st_mode & 0o7777) == (0, 0o700)
            found = (parent / "a").stat()
            assert (found.st_uid, found.st_mode & 0o7777) == (OWNER if parent == tree.unified else 0, 0o700)
        tree.destroy("a")


def test_groups_of_an_earlier_release_are_closed(tree: GroupTree) -> None:
    tree.make("a", LIMITS, OWNER).close()
    every = [path for parent in paths(tree) for path in (parent, parent / "a")]
    for path in every:
        path.chmod(0o755)
    GroupTree(cgroups.detect(), tree.unified.name).prepare()
    assert {path.stat().st_mode & 0o7777 for path in every} == {0o700}


def test_over_allocation_is_killed_and_counted(tree: GroupTree) -> None:
    with tree.make("a", LIMITS, OWNER) as group:
        assert group.counters() == groups.Counters(0, 0, group.counters().memory)
        assert start(group, sys.executable, "-c", HOG).wait(30) == -9
        assert group.counters().oom_kills == 1


def test_same_program_lives_without_the_limit(tree: GroupTree) -> None:
    """The control of the test above."""
    with tree.make("a", Limits(memory=1024 * MIB), OWNER) as group:
        assert start(group, sys.executable, "-c", HOG).wait(30) == 0
        assert group.counters().oom_kills == 0


def test_what_the_limit_of_cpu_time_keeps_back_is_counted(tree: GroupTree) -> None:
    with tree.make("a", Limits(cpus=0.1), OWNER) as group, tree.make("b", Limits(cpus=64), OWNER) as free:
        spinning = "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done"
        for each in (group, free):
            assert each.throttled() == 0
            assert start(each, "sh", "-c", spinning).wait(60) == 0
        assert group.throttled() > 0 and free.throttled() == 0


def test_what_was_kept_back_goes_on_without_the_limit(tree: GroupTree) -> None:
    """Enough to do for a minute at this limit."""
    with tree.make("a", Limits(cpus=0.01), OWNER) as group:
        spinning = start(group, sys.executable, "-c", "sum(range(20_000_000))")
        while not group.throttled():
            os.sched_yield()
        group.unthrottle()
        assert spinning.wait(10) == 0


def test_fork_bomb_hits_the_limit_and_is_ended(tree: GroupTree) -> None:
    with tree.make("a", LIMITS, OWNER) as group:
        bomb = start(group, sys.executable, "-c", BOMB)
        while not group.counters().pids_max_hits:
            os.sched_yield()
        assert 1 < len(group.pids()) <= LIMITS.pids
        assert not group.empty()
        group.kill()
        assert bomb.wait(10) == -9
        assert group.wait_empty(10)
        assert group.pids() == ()


def test_ending_one_by_one_where_there_is_no_kill_file(tree: GroupTree) -> None:
    """What v1 and old kernels get, against the same fork race."""
    with tree.make("a", LIMITS, OWNER) as group:
        path = group.v1.get("pids", group.unified)
        bomb = start(group, sys.executable, "-c", BOMB)
        while not group.counters().pids_max_hits:
            os.sched_yield()
        groups._kill_one_by_one(path)
        assert bomb.wait(10) == -9
        assert groups.wait_empty(path, 10)


def test_wait_ends_without_an_answer_while_something_lives(tree: GroupTree) -> None:
    with tree.make("a", LIMITS, OWNER) as group:
        child = started(group)
        assert not group.wait_empty(0.05)
        group.kill()
        child.wait(10)
        assert group.wait_empty(10)


def test_groups_are_found_again_by_id(tree: GroupTree) -> None:
    tree.make("a", LIMITS, OWNER).close()
    again = GroupTree(cgroups.detect(), tree.unified.name)
    again.prepare()
    assert again.list() == {"a"}
    with again.make("a", LIMITS, OWNER) as made, started(made) as child:
        found = again.open("a")
        assert found is not None
        with found:
            assert found.pids() == (child.pid,)
            assert os.fstat(found.dir_fd).st_ino == (tree.unified / "a").stat().st_ino
            found.kill()
        child.wait(10)
    assert again.open("b") is None


def test_half_made_groups_are_listed_and_not_opened(tree: GroupTree) -> None:
    (paths(tree)[-1] / "half").mkdir()
    assert tree.list() == {"half"}
    assert tree.open("half") is None or not tree.v1
    tree.destroy("half")
    assert not tree.list()


def test_destroy_takes_processes_and_sub_groups_and_may_be_repeated(tree: GroupTree) -> None:
    with tree.make("a", LIMITS, OWNER) as group:
        child = started(group)
        (group.unified / "exec-1" / "deeper").mkdir(parents=True)
        (group.unified / "exec-1" / "deeper" / "cgroup.procs").write_text(str(child.pid))
        assert group.pids() == (child.pid,)
        tree.destroy("a")
        assert child.wait(10) == -9
        assert not [path for path in paths(tree) if (path / "a").exists()]
        tree.destroy("a")
        assert group.empty()


def test_remove_refuses_while_a_process_lives(tree: GroupTree) -> None:
    with tree.make("a", LIMITS, OWNER) as group:
        child = started(group)
        with pytest.raises(TimeoutError):
            group.remove(timeout=0.05)
        group.kill()
        child.wait(10)
        group.remove()
        group.remove()


def test_owner_may_sort_its_processes_but_not_lift_limits(tree: GroupTree) -> None:
    """It starts inside its group, as the guest does by descriptor; the limits are given to it open for reading."""
    script = """
        set -e
        mkdir exec-1; echo $$ >exec-1/cgroup.procs; grep -q /a/exec-1 /proc/self/cgroup
        ! echo max >cgroup.max.depth
        for fd in $1; do cat /proc/self/fd/$fd; ! echo -1 >/proc/self/fd/$fd; done
    """
    with tree.make("a", LIMITS, OWNER) as group:
        limits = [os.open(path / name, os.O_RDONLY) for path, name in files_with_limits(group)]
        join = f'echo $$ >{group.unified}/cgroup.procs; exec setpriv --reuid {OWNER} --clear-groups sh -c "$@"'
        done = subprocess.run(
            ["sh", "-c", join, "sh", script, "sh", " ".join(map(str, limits))],
            cwd=group.unified,
            pass_fds=limits,
            capture_output=True,
            timeout=30,
            check=False,
        )
        for fd in limits:
            os.close(fd)
        assert done.returncode == 0, done.stderr.decode()
    tree.destroy("a")


def files_with_limits(group: Group) -> list[tuple[Path, str]]:
    memory, pids = group.v1.get("memory"), group.v1.get("pids", group.unified)
    return [(memory, "memory.limit_in_bytes") if memory else (group.unified, "memory.max"), (pids, "pids.max")]


def test_close_keeps_parents_that_are_in_use(tree: GroupTree) -> None:
    tree.make("a", LIMITS, OWNER).close()
    with pytest.raises(OSError, match="busy"):
        tree.close()
    tree.destroy("a")
    tree.close()
    tree.close()
    assert not [path for path in paths(tree) if path.exists()]
    assert tree.list() == frozenset()


def test_no_descriptor_is_left_open(tree: GroupTree) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        tree.make(f"s{number}", LIMITS, OWNER).close()
        tree.destroy(f"s{number}")
    assert len(os.listdir("/proc/self/fd")) == before
