"""The container backend on the kernels it promises to work on, with cgroup v2 alone, and CASES 18 where it may go wrong.

Every attack in native/tests/attack_table.h runs in sandboxes and without one, in a machine that can be lost: the control
shows that each works where nothing forbids it. One file, because the machines are shared within one.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from tests.debian import Unavailable
from tests.host.attacks import unexpected
from tests.vm import store
from tests.vm.conftest import PYTHON
from tests.vm.kernel import Kernel
from tests.vm.machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Verdicts = dict[str, dict[str, int]]
KINDS = [f"{kind} {user}" for kind in ("plain", "setuid", "ptrace") for user in ("root", "user")]
NOT_YET = {"listmount", "exchange_range"}
"""Calls that 6.1 does not have: refused there with or without a sandbox."""
ATTRIBUTES = {"security_attribute"}
"""Kernel 6.1 lets anybody set them, 7.3 does not; in a sandbox they stay in its own tree."""


@pytest.fixture(scope="session")
def found(server: Machine) -> Verdicts:
    verdicts: Verdicts = json.loads(server.check(f"{PYTHON} -m tests.vm.inside.attacks", timeout=500))
    assert server.alive
    return verdicts


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


def test_equal_files_of_two_layers_are_in_memory_once(
    machine: Machine, kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel can: read in one layer, a file is there for the other. Elsewhere it is read twice."""
    full = kernel.suite != "bookworm"
    try:
        packed = store.with_equal_files(tmp_path, monkeypatch, sharing=full)
    except Unavailable as error:
        pytest.skip(str(error))
    machine.put("/var/tmp/store.tar.gz", packed)
    machine.check("cd /var/tmp && mkdir share && tar xzf store.tar.gz -C share")
    way = "from-files" if full else ""
    seen = json.loads(machine.check(f"{PYTHON} -m tests.vm.inside.sharing /var/tmp/share/store {way}", timeout=120))
    first, second = seen.pop("read")
    assert seen == {"known": full, "equal": True, "own": ["one", "two"]}
    assert first == {"same": store.SAME}
    assert second == ({"same": store.SAME} if full else {})


@pytest.mark.parametrize("kind", KINDS)
def test_attacks_are_refused(found: Verdicts, kernel: Kernel, kind: str) -> None:
    got = unexpected(found[kind], debugging=kind.startswith("ptrace"))
    if kernel.suite == "bookworm":
        got = {name: code for name, code in got.items() if name not in ATTRIBUTES}
    assert got == {}


def test_control_each_attack_works_where_nothing_forbids_it(found: Verdicts, kernel: Kernel) -> None:
    """On one of the two file systems: some are for XFS alone, one for disks without quotas."""
    failed = {
        name: [errno.errorcode.get(code, str(code)) for code in (code, found["xfs"][name])]
        for name, code in found["control"].items()
        if code != 0 and found["xfs"][name] != 0
    }
    assert set(failed) == (NOT_YET if kernel.suite == "bookworm" else set()), failed


def test_no_attack_makes_the_kernel_load_a_module(found: Verdicts) -> None:
    assert found["modules for sandboxes"] == {}
    asked = set(found["modules for control"])
    assert {"net-pf-2-proto-130-type-5"} <= asked, "control: the kernel asks for them where nothing forbids it"


def test_the_host_has_open_files_for_all(server: Machine) -> None:
    assert server.check("cat /proc/sys/fs/file-max").split() == [str((1 << 63) - 1)]


def test_sysrq_would_have_ended_the_host(bare: Machine) -> None:
    """What the mask over /proc/sysrq-trigger keeps from a sandbox. One machine is lost."""
    assert "sysrq" in bare.crash("sleep 0.2; echo c > /proc/sysrq-trigger").lower()
    assert not bare.alive


LEFT = r"""
ls -d /sys/fs/cgroup/barchan*
grep /var/tmp/data /proc/mounts
find /run/barchan/ids ! -type d
cat /sys/block/loop*/loop/backing_file
grep -l '^NSpid:.*[0-9].*[[:space:]]1$' /proc/[0-9]*/status
"""


def test_taking_it_down_leaves_nothing(server: Machine) -> None:
    """After all sandboxes above: no group, mount, id range, loop device or process in a namespace of its own. The last
    test of a machine."""
    server.check(f"{PYTHON} -m barchan.cli.main down --data /var/tmp/data", timeout=120)
    assert server.run(f"({LEFT}) 2>/dev/null").output == ""
