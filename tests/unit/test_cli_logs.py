"""How `barchan logs` shows the outputs of commands."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.cli.logs import Lines
from barchan.cli.text import plain


class Counted(io.StringIO):
    """Standard output; counts what is written to it at once."""

    writes = 0

    def write(self, text: str, /) -> int:
        self.writes += 1
        return super().write(text)


def shown(*pieces: bytes) -> Counted:
    out = Counted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        lines = Lines("n-1")
        for piece in pieces:
            lines.write("stdout", piece)
        lines.end()
    return out


def test_many_lines_are_written_together() -> None:
    """One by one they cost half a second of processor time per MiB."""
    out = shown(*[b"y\n" * 10_000] * 10)
    assert out.getvalue() == "n-1 | y\n" * 100_000
    assert out.writes <= 20


@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"x", b"\n"))))
def test_pieces_make_no_difference(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    lines = whole.removesuffix(b"\n").split(b"\n") if whole else []
    assert shown(*pieces).getvalue() == "".join(f"n-1 | {plain(line)}\n" for line in lines)


def test_a_line_without_end_is_cut() -> None:
    text = shown(*[b"a" * 1000] * 200).getvalue()
    assert [len(line) for line in text.splitlines()] == [len("n-1 | ") + size for size in (65536, 65536, 65536, 3392)]
