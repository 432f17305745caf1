"""Text for terminals: what came from a sandbox or another user cannot move the cursor or forge a line."""

from __future__ import annotations


def plain(value: str | bytes) -> str:
    """One line without control, format or undecodable characters: each is shown as an escape."""
    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(char: str) -> str:
    if 0xDC80 <= (code := ord(char)) <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def command_line(argv: tuple[bytes, ...], most: int = 60) -> str:
    """An argument vector for reading, cut to `most` characters."""
    line = " ".join(plain(part) or "''" for part in argv)
    return line if len(line) <= most else line[: most - 1] + "…"


def size(count: float) -> str:
    """Bytes for people: `512.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


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
