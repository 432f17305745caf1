"""Values that calls return, the same for both clients."""

from __future__ import annotations

import msgspec

from barchan.errors import BarchanError, CommandFailed
from barchan.spec import ExecResult


class CompletedExec(ExecResult, frozen=True, kw_only=True):
    """How a command ended, with its output. A non-zero exit is a value here, not an exception."""

    stdout: bytes = b""
    """At most `output_limit` bytes; `stdout_dropped` says how many followed."""
    stderr: bytes = b""

    @property
    def ok(self) -> bool:
        """It ran to its end and returned 0."""
        return self.outcome == "exited" and self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as UTF-8; what is not becomes U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        return self.stderr.decode("utf-8", "replace")

    def check(self) -> CompletedExec:
        """Itself when `ok`; otherwise raises `CommandFailed`, whose `result` it is."""
        if self.ok:
            return self
        how = self.limit or (f"exit code {self.exit_code}" if self.outcome == "exited" else self.outcome)
        last = self.stderr_text.strip().splitlines()[-1:] or [""]
        raise CommandFailed(f"command failed: {how}", hint=last[0][:200], result=self)


class CreateFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why one of many could not be made."""

    index: int
    """Which of them, from 0."""
    error: BarchanError
    """As `create` would have raised it; `phase` says where, `retry` whether trying again may help."""
    queued_ms: float = 0.0
    """How long it waited before a node was asked for it, milliseconds."""
