"""What was asked and what was acknowledged in a round, kept outside of whoever dies.

One JSON object a line, each appended by one write(2): it is there whole or not at all, whatever happens to its writer. That
outlives processes; a power cut is not this ledger's subject.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

What = Literal[
    "client",  # a client process has begun (`pid`)
    "finished",  # it came to its end
    "creating", "created", "running", "ran", "writing", "wrote", "stopping", "stopped",  # asked, acknowledged
    "failed",  # a typed failure (`code`)
    "wrong",  # what must never be: other bytes, an untyped failure, no answer in time
    "killing",  # about to be killed (`verb` is what, `sandbox` whose)
]  # fmt: skip


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `box` is the key of the create and names a sandbox before it has an id."""

    what: What
    client: int = -1
    pid: int = 0
    box: str = ""
    sandbox: str = ""
    id: str = ""
    """Of a command."""
    lines: int = 0
    """Of its output: `numbered(id, lines)`, from its own program or from what it was sent."""
    code: str = ""
    exit: int = 0
    verb: str = ""
    text: str = ""
    piped: bool = False
    """The command's output is the input that it was sent."""
    pause: int = 0
    """It sleeps 20 ms each so many lines; 0: never."""


class Ledger:
    """Append to it, from any number of processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, entry: Entry) -> None:
        line = msgspec.json.encode(entry) + b"\n"
        if os.write(self._fd, line) != len(line):
            raise OSError("the ledger is full")


def read(path: Path) -> Iterator[Entry]:
    for line in path.read_bytes().splitlines():
        yield msgspec.json.decode(line, type=Entry)


def numbered(id: str, lines: int) -> bytes:
    """The output of a command: any byte that is missing, doubled or somebody else's shows."""
    return b"".join(b"%s %d\n" % (id.encode(), i) for i in range(lines))


def script(entry: Entry) -> str:
    """The command of a `running` entry. It first says in /count that it ran: a second run would say so again."""
    count = f"echo {entry.id} >> /count; "
    pause = f"[ $((i % {entry.pause})) = 0 ] && sleep 0.02; " if entry.pause else ""
    loop = f"i=0; while [ $i -lt {entry.lines} ]; do echo {entry.id} $i; i=$((i+1)); {pause}done; "
    return f"{count}{'cat; ' if entry.piped else loop}exit {entry.exit}"


def content(box: str) -> bytes:
    """Of the file that a box is sent: too long for one frame."""
    return numbered(f"file of {box}", 12_000)
