"""The host's bound of open files: raised where it may be, and counted where it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from barchan.kernel import probe, processes
from barchan.kernel.processes import FILES_UNBOUNDED, files_free, unbind_files


def test_it_is_raised_as_far_as_it_goes(tmp_path: Path) -> None:
    setting = tmp_path / "file-max"
    setting.write_text("2466193\n")
    assert unbind_files(setting) == FILES_UNBOUNDED
    assert setting.read_text() == str(FILES_UNBOUNDED)


def test_one_that_is_not_ours_stays() -> None:
    """A kernel's own constant: reads as a number, takes no writing."""
    setting = Path("/proc/sys/kernel/ngroups_max")
    assert unbind_files(setting) == int(setting.read_text())


def test_what_is_left_is_less_than_all() -> None:
    assert 0 < files_free() < FILES_UNBOUNDED


@pytest.mark.parametrize(("bound", "ok"), [(2_466_193, False), (FILES_UNBOUNDED, True)])
def test_doctor_says_whether_it_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int, ok: bool
) -> None:
    setting = tmp_path / "file-max"
    setting.write_text(str(bound))
    monkeypatch.setattr(processes, "FILE_MAX", setting)
    said = probe._has_files()
    assert said is None if ok else said is not None and str(bound) in said
