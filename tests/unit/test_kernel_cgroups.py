from __future__ import annotations

from pathlib import Path

import pytest

from barchan.errors import FeatureMissing
from barchan.kernel import mounts
from barchan.kernel.cgroups import CgroupLayout, GroupTree, layout_of

V2 = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = """31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
"""
BESIDE = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
ALL = ("cpu", "memory", "pids")


def layout(table: str, controllers: tuple[str, ...] = ()) -> CgroupLayout:
    return layout_of(mounts.parse(table), controllers)


def test_v2() -> None:
    found = layout(V2, ALL)
    assert (found.kind, found.unified, found.v1) == ("v2", Path("/sys/fs/cgroup"), {})
    assert found.missing() == ()
    assert found.describe() == ""


def test_hybrid_tells_what_v1_costs() -> None:
    found = layout(HYBRID + BESIDE)
    assert found.kind == "hybrid"
    assert found.v1["cpu"] == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert found.missing() == ()
    assert "memory at /sys/fs/cgroup/memory" in found.describe()
    assert "systemd.unified_cgroup_hierarchy=1" in found.describe()


def test_controllers_may_be_split_between_both() -> None:
    table = "\n".join(line for line in HYBRID.splitlines() if "pids" not in line) + "\n"
    found = layout(table + BESIDE, ("pids",))
    assert set(found.v1) == {"cpu", "memory"}
    assert found.missing() == ()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (layout(HYBRID), "no cgroup2 is mounted"),
        (layout(V2, ("cpu", "pids")), "no cgroup controller for memory"),
        (layout(V2), "memory, cpu, pids"),
        (layout(""), "no cgroup2 is mounted"),
    ],
)
def test_unusable_layouts_are_refused_with_one_message(found: CgroupLayout, said: str) -> None:
    with pytest.raises(FeatureMissing, match=said):
        GroupTree(found, "barchan-x")
