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


def start(group: Group, *argv: str) -> subprocess.Popen[bytes]:
    """A program that is in all groups from its first instruction: the shell joins them and becomes it."""
    files = [path / "cgroup.procs" for path in (group.unified, *group.v1.values())]
    join = "".join(f"echo $$ >{file}; " for file in files)
    return subprocess.Popen(["sh", "-c", join + 'exec "$@"', "sh", *argv])


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
    script = """
        set -e
        cd "$1"; mkdir exec-1; echo $$ >exec-1/cgroup.procs; grep -q /a/exec-1 /proc/self/cgroup
        ! echo max >cgroup.max.depth
        for file in $2; do ! echo -1 >$file; done
    """
    with tree.make("a", LIMITS, OWNER) as group:
        limits = " ".join(str(path / name) for path, name in files_with_limits(group))
        join = f'echo $$ >{group.unified}/cgroup.procs; exec setpriv --reuid {OWNER} --clear-groups sh -c "$@"'
        done = subprocess.run(
            ["sh", "-c", join, "sh", script, "sh", str(group.unified), limits],
            capture_output=True,
            timeout=30,
            check=False,
        )
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
