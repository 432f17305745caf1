"""CASES 18 where it may go wrong: every attack in native/tests/attack_table.h, in sandboxes and without one, in a machine
that can be lost. The control shows that each attack works where nothing forbids it."""

from __future__ import annotations

import errno
import json

import pytest

from tests.host.attacks import unexpected
from tests.vm.conftest import PYTHON
from tests.vm.kernel import Kernel
from tests.vm.machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Verdicts = dict[str, dict[str, int]]
KINDS = [f"{kind} {user}" for kind in ("plain", "setuid", "ptrace") for user in ("root", "user")]
NOT_YET = {"listmount", "exchange_range"}
"""Calls that 6.1 does not have: refused there with or without a sandbox."""
ATTRIBUTES = {"security_attribute"}
"""Kernels below 6.10 let anybody set them as long as a BPF LSM is loaded; in a sandbox they stay in its own tree."""


@pytest.fixture(scope="session")
def found(server: Machine) -> Verdicts:
    verdicts: Verdicts = json.loads(server.check(f"{PYTHON} -m tests.vm.inside.attacks", timeout=300))
    assert server.alive
    return verdicts


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


def test_sysrq_would_have_ended_the_host(bare: Machine) -> None:
    """What the mask over /proc/sysrq-trigger keeps from a sandbox. One machine is lost."""
    assert "sysrq" in bare.crash("sleep 0.2; echo c > /proc/sysrq-trigger").lower()
    assert not bare.alive
