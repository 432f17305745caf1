"""File locks are found however they are held, and who holds very many is ended: native/tests/hold_locks.c takes them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.kernel.filelocks import LockMeter, held
from barchan.node.lockwatch import FEW, Alarm, guilty
from tests.host import spawn_site

COUNT = 500


@pytest.fixture(scope="module")
def program() -> Path:
    spawn_site.build_programs()
    return spawn_site.NATIVE / "build" / "hold_locks"


@contextlib.contextmanager
def holding(program: Path, *arguments: str) -> Iterator[int]:
    with subprocess.Popen([program, *arguments], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"held\n"
            yield child.pid
        finally:
            child.kill()


@pytest.mark.parametrize("how", ["", "open", "shared"])
def test_locks_are_counted_however_they_are_held(program: Path, how: str) -> None:
    """Of the process, of the open file, of one that ended and left them to another: the last two have no owner in /proc/locks."""
    with holding(program, str(COUNT), how) as pid:
        assert held([pid], FEW) == COUNT
        assert held([pid, pid, os.getpid()], FEW) == COUNT, "seen twice, counted once"
        assert 100 <= held([pid], 100) <= COUNT
    assert held([pid], FEW) == 0


def test_the_meter_sees_them(program: Path) -> None:
    with contextlib.closing(LockMeter()) as meter:
        before = meter.size()
        with holding(program, "20000"):
            assert meter.size() > before + 20_000 * 100


def test_when_to_search() -> None:
    alarm = Alarm(allowed=100)
    assert not alarm.rings(100) and alarm.rings(101) and alarm.rings(500), "until something is done"
    alarm.found_nobody(500)
    assert not alarm.rings(600) and alarm.rings(601)
    assert not alarm.rings(50)
    assert alarm.rings(151), "what was put up with counts only as long as it is there"


def test_few_locks_are_nobodys_business() -> None:
    assert guilty({"a": FEW, "b": FEW + 1, "c": 0}) == ["b"]
