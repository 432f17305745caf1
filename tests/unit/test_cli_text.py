"""What comes from a sandbox cannot act on the terminal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.cli import tables
from barchan.cli.session import to_json
from barchan.cli.text import command_line, plain, span
from barchan.sizes import size


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
        ("\U000e0001x", "\\U000e0001x"),
    ],
)
def test_plain(value: str | bytes, shown: str) -> None:
    assert plain(value) == shown


@pytest.mark.parametrize(("width", "heads"), [(80, "id a bb c"), (17, "id a c"), (13, "id a"), (3, "id a")])
def test_a_narrow_terminal_shows_fewer_columns(width: int, heads: str) -> None:
    head, rows = tables.fitted(("id", ">a", ">bb", ">c"), [("n-12345", "1", "22", "333")], width, (">bb", ">c"))
    assert " ".join(head).replace(">", "") == heads
    assert rows == [[{"id": "n-12345", "a": "1", "bb": "22", "c": "333"}[one] for one in heads.split()]]


@given(st.one_of(st.text(), st.binary()))
def test_plain_is_always_one_printable_line(value: str | bytes) -> None:
    shown = plain(value)
    assert shown.isprintable()
    shown.encode()


@pytest.mark.parametrize("text", ["\u202eevil", "\x9b31m", "\x7f", "a\x1b\n\u2028", "\u2066x\u2069", "\U000e0001tag"])
def test_json_holds_nothing_that_acts_on_a_terminal(text: str) -> None:
    document = to_json({"label": text, "häuser": "砂"}).decode()
    assert document.isprintable()
    assert json.loads(document) == {"label": text, "häuser": "砂"}
    assert '"häuser":"砂"' in document


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_json_is_always_one_printable_line(text: str) -> None:
    document = to_json([text]).decode()
    assert document.isprintable() and json.loads(document) == [text]


def test_command_line() -> None:
    assert command_line((b"echo", b"", b"\x1b[2J", b"a b", b"it's")) == """echo '' '\\x1b[2J' 'a b' 'it'"'"'s'"""
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
