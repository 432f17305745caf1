"""Text for terminals: what came from a sandbox or another user cannot move the cursor or forge a line."""

from __future__ import annotations

import shlex

from barchan.sizes import size


def plain(value: str | bytes) -> str:
    """One line without control, format or undecodable characters: each is shown as an escape."""
    return plain_lines(value).replace("\n", "\\n")


def plain_lines(value: str | bytes) -> str:
    """As `plain`, but line ends stay what they are."""
    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
    return text if text.isprintable() else text.translate(_SHOWN)


_RAW = range(0xDC80, 0xDD00)
"""What bytes that are no UTF-8 were decoded to."""


class _Shown(dict[int, str]):
    """Characters and what is shown for them, by their numbers."""

    KEPT = 0x800
    """Those below are looked up often; a sandbox that sends all that there are must not fill this."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        shown = char if char.isprintable() or char == "\n" else _escape(char)
        if code < self.KEPT or code in _RAW:
            self[code] = shown
        return shown


_SHOWN = _Shown()


def _escape(char: str) -> str:
    if (code := ord(char)) in _RAW:
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def escaped(document: str) -> str:
    """The same JSON, on one line, in which every character can be printed."""
    return document if document.isprintable() else "".join(c if c.isprintable() else _utf16(c) for c in document)


def _utf16(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def command_line(argv: tuple[bytes, ...], most: int = 60) -> str:
    """An argument vector as a shell would take it, cut to `most` characters."""
    line = shlex.join(plain(part) for part in argv)
    return line if len(line) <= most else line[: most - 1] + "…"


class Bytes(int):
    """A number of bytes: a number for programs, with a unit for people."""

    def __str__(self) -> str:
        return size(self)


def span(seconds: float) -> str:
    """A duration for people: `4 s`, `12 min`, `3 h`, `2 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
