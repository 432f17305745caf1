"""The shared file system that other tests and the benches use: what it promises them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from tests.disks import real_disk
from tests.juicefs import JuiceFS, juicefs

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[JuiceFS]:
    with real_disk() as path:
        with juicefs(path, cache_mib=64, delay=0.001, rate=50e6) as found:
            yield found
            pids = found.pids()
        assert pids and not found.pids()
        assert not found.root.is_mount()


def test_what_is_written_is_read_again_over_the_link(shared: JuiceFS) -> None:
    content = os.urandom(8 * MIB)
    (shared.root / "file").write_bytes(content)
    shared.empty_cache()
    before, began = shared.fetched(), time.monotonic()
    assert (shared.root / "file").read_bytes() == content
    fetched, seconds = shared.fetched() - before, time.monotonic() - began
    assert len(content) <= fetched < len(content) + MIB
    assert seconds >= len(content) / 50e6
    before = shared.fetched()
    assert (shared.root / "file").read_bytes() == content
    assert shared.fetched() - before < MIB // 16, "it was to come from the cache"


def test_reader_waits_while_the_link_is_cut(shared: JuiceFS) -> None:
    (shared.root / "later").write_bytes(b"x" * MIB)
    shared.empty_cache()
    found: list[bytes] = []
    shared.link.cut()
    try:
        reader = threading.Thread(target=lambda: found.append((shared.root / "later").read_bytes()))
        reader.start()
        reader.join(timeout=1)
        assert reader.is_alive() and not found
    finally:
        shared.link.restore()
    reader.join(timeout=60)
    assert found == [b"x" * MIB]
