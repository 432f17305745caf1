"""What comes from a sandbox cannot act on the terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.cli import tables
from barchan.cli.text import command_line, plain, size, span


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("häuser 砂", "häuser 砂"),
        ("a\x1b[31mred", "a\\x1b[31mred"),
        ("a\nb\r\tc\x07\x7f", "a\\nb\\r\\tc\\x07\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eevil", "\\u202eevil"),
        ("x\u2028y", "x\\u2028y"),
        (b"\xff\xfe!", "\\xff\\xfe!"),
        (b"\xc3\xa4", "ä"),
    ],
)
def test_plain(value: str | bytes, shown: str) -> None:
    assert plain(value) == shown


@given(st.one_of(st.text(), st.binary()))
def test_plain_is_always_one_printable_line(value: str | bytes) -> None:
    shown = plain(value)
    assert shown.isprintable()
    shown.encode()


def test_command_line() -> None:
    assert command_line((b"echo", b"", b"\x1b[2J")) == "echo '' \\x1b[2J"
    assert command_line((b"x" * 100,), most=10) == "x" * 9 + "…"


def test_table_shows_markup_and_controls_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show(("id", ">n"), [("[red]x[/red]", "1"), ("\x1b]0;title\x07", "22"), ("y" * 300, "3")])
    out = capsys.readouterr().out
    assert "[red]x[/red]" in out
    assert "\x1b" not in out
    assert "\\x1b]0;title\\x07" in out
    assert len(out.splitlines()) == 4, "a row is one line when nobody looks"


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1536, 512 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "512.0 MiB",
        "3.0 TiB",
    ]
    assert [span(s) for s in (0, 90, 600, 7200, 86400 * 3)] == ["0 s", "90 s", "10 min", "2 h", "3 d"]
