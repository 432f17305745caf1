"""What `barchan cp` says of what it left out."""

from __future__ import annotations

from barchan.cli.cp import skip_notes
from barchan.sdk import TransferReport

REPORT = TransferReport(
    files=1,
    bytes=1,
    skipped={b"pipe": "special", b"a\x1b": "unreadable"},
    skipped_more={"unreadable": 7, "link_out": 1},
)


def test_those_without_a_name_are_counted() -> None:
    assert list(skip_notes(REPORT, verbose=False)) == [
        "1 link that leads out of the tree skipped (-v names all)",
        "1 FIFO, socket or device skipped (-v names all)",
        "skipped a\\x1b: may not be read",
        "7 more that may not be read skipped (-v names all)",
    ]


def test_all_that_have_names_are_named() -> None:
    assert list(skip_notes(REPORT, verbose=True)) == [
        "1 link that leads out of the tree skipped",
        "skipped pipe: FIFO, socket or device",
        "skipped a\\x1b: may not be read",
        "7 more that may not be read skipped",
    ]
