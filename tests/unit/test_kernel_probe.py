from __future__ import annotations

import pytest

from barchan.errors import FeatureMissing
from barchan.kernel.cgroups import CgroupLayout
from barchan.kernel.probe import Check, HostReport, classify, version_of


def check(name: str, ok: bool, needed: bool = False) -> Check:
    return Check(name, ok, needed, "what it is for", "do this", "" if ok else "it said so")


@pytest.mark.parametrize(
    ("release", "version"), [("6.18.44-fc-v595", (6, 18)), ("6.1.0-28-amd64", (6, 1)), ("7.3", (7, 3)), ("odd", (0, 0))]
)
def test_version(release: str, version: tuple[int, int]) -> None:
    assert version_of(release) == version


@pytest.mark.parametrize(
    ("release", "abilities", "kernel"),
    [
        ("6.13.0", (True, True, True), "full"),
        ("6.13.0", (True, False, True), "reduced"),
        ("6.1.0", (False, False, False), "reduced"),
        ("6.0.9", (False, False, False), "too_old"),
        ("5.10.0", (True, True, True), "too_old"),
    ],
)
def test_kernel_matrix(release: str, abilities: tuple[bool, ...], kernel: str) -> None:
    assert classify(release, tuple(check("x", ok) for ok in abilities)) == kernel


def report(*checks: Check) -> HostReport:
    return HostReport("full", "6.18", "simple", CgroupLayout(None, frozenset(), {}), checks)


def test_needed_ability_stops_with_its_name_and_remedy() -> None:
    with pytest.raises(FeatureMissing, match=r"btrfs \(it said so\)") as caught:
        report(check("btrfs", False, needed=True), check("kvm", False)).require()
    assert caught.value.hint == "do this"


def test_optional_ability_is_only_a_note() -> None:
    found = report(check("btrfs", True, needed=True), check("kvm", False))
    found.require()
    assert found.notes() == ("kvm: what it is for",)
