"""What the machines are made of, without starting one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.debian import Unavailable
from tests.vm import initrd, machine
from tests.vm.kernel import Kernel, load_order, needs
from tests.vm.machine import boot, tsc_khz


def module(*names: str) -> bytes:
    return b"\0license=GPL\0depends=" + ",".join(names).encode() + b"\0name=x\0"


def test_modules_come_after_what_they_need() -> None:
    known = {"a": module("b_c", "d"), "b_c": module("d"), "d": module(), "other": module()}
    assert load_order(("a", "b-c", "absent"), known) == ["d", "b_c", "a"]


def test_a_module_that_needs_nothing() -> None:
    assert needs(module()) == [] and needs(b"no module at all") == []


def test_the_archive_is_one_that_cpio_reads(tmp_path: Path) -> None:
    ko = tmp_path / "00-x.ko"
    ko.write_bytes(b"odd")
    listed = subprocess.run(
        [initrd.BUSYBOX, "cpio", "-t"], input=initrd.build([ko], [ko]), capture_output=True, check=True
    )
    assert {b"init", b"modules/00-x.ko", b"vm/more/00-x.ko", b"dev/console"} <= set(listed.stdout.split())


def test_a_host_without_qemu_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROGRAM", "qemu-that-nobody-has")
    nothing = Kernel("none", "0", tmp_path / "vmlinuz", (), ())
    with pytest.raises(Unavailable, match="qemu-system-x86"), boot(nothing, tmp_path):
        pass


def test_a_machine_that_does_not_start_is_reported(tmp_path: Path) -> None:
    if shutil.which(machine.PROGRAM) is None:
        pytest.skip("qemu-system-x86 is missing")
    (tmp_path / "vmlinuz").write_bytes(b"no kernel")
    with pytest.raises(machine.Stuck, match="ended"), boot(Kernel("none", "0", tmp_path / "vmlinuz", (), ()), tmp_path):
        pass


def test_the_clock_is_plausible() -> None:
    assert 500_000 < tsc_khz() < 10_000_000
