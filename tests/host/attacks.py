"""How to read what native/tests/attack_kernel prints: one verdict per attack, an errno."""

from __future__ import annotations

import errno

REFUSED = {
    errno.EPERM,
    errno.EACCES,
    errno.ENOSYS,
    errno.ENOENT,
    errno.EROFS,
    errno.EAFNOSUPPORT,
    errno.EPROTONOSUPPORT,
}
"""Forbidden, or not there."""
DEBUGGING = {"ptrace", "read_memory", "steal_descriptor"}
"""What a sandbox may do to its own processes when it was asked to be debuggable."""


def verdicts(output: str) -> dict[str, int]:
    """By attack: errno, 0 when it worked, -N when signal N ended it."""
    found = {name: int(code) for name, _, code in (line.partition(" ") for line in output.splitlines())}
    assert len(found) > 100, output
    return found


def unexpected(found: dict[str, int], *, debugging: bool = False) -> dict[str, str]:
    """Attacks that were not refused, and with what."""
    allowed = DEBUGGING if debugging else set()
    return {
        name: errno.errorcode.get(code, str(code))
        for name, code in found.items()
        if code not in REFUSED and name not in allowed
    }
