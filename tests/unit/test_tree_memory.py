"""What a hostile tree costs its client: a sandbox makes entries behind long paths for next to nothing."""

from __future__ import annotations

import os
import stat
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.sdk._tree import TreeWriter
from barchan.wire.guest import Entry, encode_entry

MIB = 1 << 20
LONG = b"/".join([b"d" * 250] * 15)
COUNT = 3000
"""Whose paths together are 11 MiB."""


def entry(path: bytes, kind: str, mode: int = 0o755, target: bytes = b"") -> bytes:
    return encode_entry(Entry(path, kind, mode, 0, 0, 1, 0, 1_000_000_007, target))


def long_tree(kind: str, target: bytes = b"") -> Iterator[bytes]:
    yield entry(b"", "d")
    for end in range(250, len(LONG) + 1, 251):
        yield entry(LONG[:end], "d")
    for number in range(COUNT):
        yield entry(b"%s/x%d" % (LONG, number), kind, target=target)


@pytest.mark.parametrize(("kind", "named"), [("d", False), ("p", True), ("x", True), ("l", True)])
def test_memory_does_not_grow_with_the_tree(tmp_path: Path, kind: str, named: bool) -> None:
    tracemalloc.start()
    try:
        with TreeWriter(tmp_path / "t", MIB, 2 * COUNT) as writer:
            for one in long_tree(kind, target=b"/outside"):
                writer.feed(one)
            report = writer.finish()
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    finally:
        tracemalloc.stop()
    assert bool(report.skipped) == named
    assert len(report.skipped) + sum(report.skipped_more.values()) == (COUNT if named else 0)
    assert (len(report.skipped) > 100 and len(report.skipped_more) == 1) == named


def test_few_that_are_skipped_are_all_named(tmp_path: Path) -> None:
    with TreeWriter(tmp_path / "t", MIB, 10_000) as writer:
        writer.feed(entry(b"", "d") + b"".join(entry(b"x%d" % number, "p") for number in range(5000)))
        report = writer.finish()
    assert (len(report.skipped), report.skipped_more) == (5000, {})


def test_a_directory_gets_its_mode_and_time_when_nothing_more_goes_into_it(tmp_path: Path) -> None:
    """Also the outer ones, and those of which siblings have the same beginning."""
    names = (b"a", b"a/b", b"a/b/c", b"a/bb", b"a/bb/c", b"ab", b"ab/d")
    with TreeWriter(tmp_path / "t", MIB, 100) as writer:
        writer.feed(entry(b"", "d", 0o711))
        for name in names:
            writer.feed(entry(name, "d", 0o500) + entry(name + b"/link", "l", target=b"x"))
        writer.finish()
    for name in (b"", *names):
        found = os.stat(os.fsencode(tmp_path / "t") + b"/" + name)
        assert found.st_mtime_ns == 1_000_000_007, name
        assert stat.S_IMODE(found.st_mode) == (0o500 if name else 0o711), name
