"""What a download leaves when its caller goes away while a thread still writes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from barchan.sdk._tree import TreeWriter
from barchan.wire.guest import Entry, blob, encode_entry


def item(path: bytes, kind: str, content: bytes = b"new") -> bytes:
    head = encode_entry(Entry(path, kind, 0o755, 0, 0, 1, len(content), 0, b""))
    return head + blob(content) + blob(b"") if kind == "f" else head


def test_nothing_is_written_once_the_caller_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is in the first of two files when the block is left: neither appears, and no descriptor is used again."""
    writing, left = threading.Event(), threading.Event()
    real = os.write

    def slow(fd: int, data: memoryview) -> int:
        writing.set()
        assert left.wait(10)
        return real(fd, data)

    (tmp_path / "a").write_text("old")
    writer = TreeWriter(tmp_path, 1 << 20, 100)
    monkeypatch.setattr("barchan.sdk._arriving.os.write", slow)
    feeder = threading.Thread(target=writer.feed, args=(item(b"", "d") + item(b"a", "f") + item(b"b", "f"),))
    with writer:
        feeder.start()
        assert writing.wait(10)
        threading.Thread(target=leave, args=(writer, left)).start()
    feeder.join(10)
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def leave(writer: TreeWriter, left: threading.Event) -> None:
    """Lets the write go on as soon as the block is being left."""
    while not writer._left:
        os.sched_yield()
    left.set()
