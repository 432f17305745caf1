"""What JSON bodies look like where the link's messages do not serve as they are (bytes)."""

from __future__ import annotations

import msgspec

from barchan.errors import InvalidRequest
from barchan.spec import MIB, Exec, ExecInfo, ExecResult, FileStat
from barchan.wire.guest import Entry

MAX_OUTPUT = 16 * MIB
SHELL = b"/bin/sh"


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Health(_Body, frozen=True, kw_only=True):
    status: str
    version: str


class Renewal(_Body, frozen=True, kw_only=True):
    """Seconds. Absent: leave as it is."""

    idle_timeout: float | None = None
    lifetime: float | None = None


class PullBody(_Body, frozen=True, kw_only=True):
    """`again`: ask the registry what a tag means now; otherwise an image of it that is there will do. `node`: only there."""

    image: str
    again: bool = True
    node: str | None = None


class SignalBody(_Body, frozen=True, kw_only=True):
    signal: int
    everyone: bool = False


class Done(_Body, frozen=True, kw_only=True):
    """Nothing to say but that it happened."""

    ok: bool = True


class ExecBody(_Body, frozen=True, kw_only=True):
    """Give `argv` (no shell), or `cmd` (run by /bin/sh -c). Times are seconds, sizes bytes."""

    argv: tuple[str, ...] | None = None
    cmd: str | None = None
    id: str | None = None
    """Send the same id again to get the same command's result instead of a second run; cancel and signal use it, too."""
    cwd: str | None = None
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    user: str | None = None
    timeout: float | None = None
    grace: float = 1.0
    stdin: str | None = None
    stdin_base64: bytes | None = None
    output_limit: int = MIB
    """Per stream, at most 16 MiB here; the WebSocket has no such bound."""
    merge_stderr: bool = False
    keep_background: bool = False

    def input(self) -> bytes | None:
        if self.stdin is not None and self.stdin_base64 is not None:
            raise InvalidRequest("give stdin or stdin_base64, not both", field="stdin")
        return self.stdin.encode() if self.stdin is not None else self.stdin_base64

    def exec(self) -> Exec:
        """Raises `InvalidRequest`."""
        if not 0 <= self.output_limit <= MAX_OUTPUT:
            raise InvalidRequest(
                "output_limit: out of range", field="output_limit", hint=f"at most {MAX_OUTPUT}; the SDK has no bound"
            )
        return Exec(
            argv=self._argv(),
            cwd=None if self.cwd is None else self.cwd.encode(),
            env=_encoded(self.env),
            secrets=_encoded(self.secrets),
            user=self.user,
            timeout=self.timeout,
            grace=self.grace,
            stdin=self.input() is not None,
            output_limit=self.output_limit,
            merge_stderr=self.merge_stderr,
            keep_background=self.keep_background,
        )

    def _argv(self) -> tuple[bytes, ...]:
        if (self.argv is None) == (self.cmd is None):
            raise InvalidRequest("give argv or cmd", field="argv")
        if self.cmd is not None:
            return (SHELL, b"-c", self.cmd.encode())
        return tuple(item.encode() for item in self.argv or ())


class ExecAnswer(ExecResult, frozen=True, kw_only=True):
    """`stdout` and `stderr` are decoded for reading; the exact bytes are in base64."""

    stdout: str
    stderr: str
    stdout_base64: bytes
    stderr_base64: bytes

    @classmethod
    def of(cls, result: ExecResult, stdout: bytes, stderr: bytes) -> ExecAnswer:
        return cls(
            **msgspec.structs.asdict(result),
            stdout=stdout.decode("utf-8", "replace"),
            stderr=stderr.decode("utf-8", "replace"),
            stdout_base64=stdout,
            stderr_base64=stderr,
        )


class ExecRecord(_Body, frozen=True, kw_only=True):
    id: str
    argv: tuple[str, ...]
    """Decoded for reading."""
    shell: str | None = None
    """Of a command in a shell session: the session's id."""
    started: float
    result: ExecResult | None

    @classmethod
    def of(cls, info: ExecInfo) -> ExecRecord:
        argv = tuple(item.decode("utf-8", "replace") for item in info.argv)
        return cls(id=info.id, argv=argv, shell=info.shell, started=info.started, result=info.result)


KINDS = {
    "f": "file",
    "d": "directory",
    "l": "symlink",
    "p": "fifo",
    "s": "socket",
    "c": "char",
    "b": "block",
}


class FileEntry(_Body, frozen=True, kw_only=True):
    """`path` and `target` are decoded for reading; the exact bytes are in base64."""

    path: str
    path_base64: bytes
    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: str

    @classmethod
    def of(cls, entry: Entry | FileStat) -> FileEntry:
        return cls(
            path=entry.path.decode("utf-8", "replace"),
            path_base64=entry.path,
            kind=KINDS.get(entry.kind, entry.kind),
            size=entry.size,
            mode=entry.mode,
            uid=entry.uid,
            gid=entry.gid,
            mtime_ns=entry.mtime_ns,
            target=entry.target.decode("utf-8", "replace"),
        )


def _encoded(values: dict[str, str]) -> dict[bytes, bytes]:
    return {key.encode(): value.encode() for key, value in values.items()}
