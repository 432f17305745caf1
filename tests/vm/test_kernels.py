"""The container backend on the kernels it promises to work on, with cgroup v2 alone: none of that can be had on every host."""

from __future__ import annotations

import json

import pytest

from tests.vm.conftest import PYTHON
from tests.vm.kernel import Kernel
from tests.vm.machine import Machine

pytestmark = pytest.mark.slow


def test_doctor_finds_what_the_kernel_has(machine: Machine, kernel: Kernel) -> None:
    report = json.loads(machine.check(f"{PYTHON} -m barchan.cli.main doctor --data /var/tmp --json"))
    assert report["containers"], report
    assert report["cgroups"] == "v2"
    expected = ("reduced", "ordinary") if kernel.suite == "bookworm" else ("full", "simple")
    assert (report["kernel"], report["quota"]) == expected, report


def test_a_sandbox_from_create_to_stop(server: Machine, kernel: Kernel) -> None:
    seen = json.loads(server.check(f"{PYTHON} -m tests.vm.inside.journey", timeout=300))
    # Without idmapped tmpfs (before 6.3) devices and shared memory belong to nobody, and work as well.
    tmpfs = "65534 65534\n" * 2 if kernel.suite == "bookworm" else "0 0\n" * 2
    assert seen["exec"] == {
        "plain": [3, "out\n", "err\n"],
        "fed": 100_000,
        "late": "timed_out",
        "back": "started\n",
        "sleepers": 1,
        "group": True,
        "root": f"0 0\n{tmpfs}0 0\n",
    }
    assert seen["files"] == {"read": 250_000, "listed": ["a", "up"], "down": "tree", "lower": False}
    assert seen["limits"] == {"memory": "oom", "disk": "disk_full", "pids": "pids", "alive": "alive\n"}


def test_nothing_stays_behind(server: Machine) -> None:
    """After the sandboxes of the other tests: one parent group, no process of a sandbox, no subvolume."""
    script = (
        "ls /sys/fs/cgroup/barchan-*/ | grep -v ^cgroup | grep -v '\\.' ; ls /var/tmp/data/scratch; ls /run/barchan/ids"
        "; grep -l ^NSpid:.*[[:space:]]1$ /proc/[0-9]*/status"
    )
    assert server.run(script).output.splitlines() == []
