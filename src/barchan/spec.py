"""The values that cross layers: what a caller asks for, what is running, what came out of it.

All are frozen and strict: an unknown field or a wrong type is refused when decoded. Sizes are bytes, times are
seconds, unless a name says otherwise. Validation that a type cannot express is in `check_*` below; each raises
`InvalidRequest` with the field's name.
"""

from __future__ import annotations

import re
from typing import Literal, NewType

import msgspec

from barchan.environments import EnvironmentRef as EnvironmentRef
from barchan.environments import PullProgress, check_environment
from barchan.errors import ErrorBody, InvalidRequest
from barchan.mounts import DataMount, check_mounts
from barchan.names import NAME
from barchan.networks import NetworkInfo, NetworkRules, check_network
from barchan.pools import PoolInfo
from barchan.ranges import LIMITS, check_limit

SandboxId = NewType("SandboxId", str)
ExecId = NewType("ExecId", str)
NodeName = NewType("NodeName", str)

BackendName = Literal["function", "container", "microvm", "vm"]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every request and answer."""


class Limits(_Value, frozen=True, kw_only=True):
    """What one sandbox may use. Over-use is answered by name: `oom`, `pids`, `disk_full`."""

    memory: int = 512 * MIB
    """Bytes of memory, page cache of its own files included."""
    cpus: float = 1.0
    """CPU time per second of wall time; 0.5 is half a core."""
    pids: int = 512
    """Processes and threads together."""
    disk: int = 2 * GIB
    """Bytes the sandbox may write."""
    files: int = 4096
    """Open files per process."""


class SandboxSpec(_Value, frozen=True, kw_only=True):
    """One request value for a sandbox of any backend."""

    environment: EnvironmentRef
    backend: BackendName = "container"
    limits: Limits = Limits()
    network: NetworkRules = NetworkRules()
    labels: dict[str, str] = {}
    env: dict[str, str] = {}
    """Environment of every program started in it."""
    secrets: dict[str, str] = {}
    """Like `env`, but the values are never stored or shown: records hold a keyed digest."""
    user: str | None = None
    """Name, `uid` or `uid:gid`; None: as the image says, else root."""
    workdir: str | None = None
    """Absolute; None: as the image says, else `/`."""
    hostname: str = "sandbox"
    idle_timeout: float = 3600.0
    """Seconds without any request after which it is stopped."""
    lifetime: float = 86400.0
    """Seconds after creation when it is stopped in any case."""
    setuid: bool = False
    """Let set-user-id programs work (turns no_new_privs and nosuid off)."""
    ptrace: bool = False
    """Give the sandbox SYS_PTRACE over its own processes (debuggers)."""
    mounts: tuple[DataMount, ...] = ()
    """Directories of the node to read, by the names that its administrator gave them."""


SandboxState = Literal["creating", "ready", "stopping", "stopped", "failing", "failed"]


class SandboxInfo(_Value, frozen=True, kw_only=True):
    """What a node says about one of its sandboxes. Times are Unix seconds."""

    id: SandboxId
    state: SandboxState
    backend: BackendName
    environment: EnvironmentRef
    limits: Limits
    labels: dict[str, str]
    created: float
    last_used: float
    expires: float
    pid: int = 0
    """Of its first process on the node; 0 when not running."""
    ready_ms: float = 0.0
    """From the node's admission to a sandbox that answers, milliseconds."""
    queued_ms: float = 0.0
    """In answers to `create_many`: how long it waited before a node was asked for it, milliseconds."""
    ended: float = 0.0
    """When it stopped or failed; 0 until then."""
    reason: str = ""
    """Why it stopped or failed."""
    pulling: PullProgress | None = None
    """While it waits for an image: how far that is."""


class Terminal(_Value, frozen=True, kw_only=True):
    """The size of a pseudo-terminal, in characters."""

    rows: int = 24
    columns: int = 80


class Exec(_Value, frozen=True, kw_only=True):
    """One command to run. `argv`, `cwd` and `env` are bytes: no shell, no quoting, any byte but NUL."""

    argv: tuple[bytes, ...]
    cwd: bytes | None = None
    env: dict[bytes, bytes] = {}
    secrets: dict[bytes, bytes] = {}
    user: str | None = None
    timeout: float | None = None
    """Seconds; then the whole process tree is ended and the outcome is `timed_out`."""
    grace: float = 1.0
    """Seconds between SIGTERM and SIGKILL at the time-out; 0 kills at once."""
    stdin: bool = False
    """Whether the caller sends input; otherwise the program reads end-of-file."""
    output_limit: int = 64 * MIB
    """Bytes kept per stream; what follows is read, counted and dropped."""
    merge_stderr: bool = False
    keep_background: bool = False
    """Wait for end-of-file on the output even after the main process ended."""
    tty: Terminal | None = None
    """Run it on a terminal of its own: input and output are the terminal's, all output is stdout."""
    opens_shell: bool = False
    """The program is a shell that takes command lines one at a time, each an `Exec` with `shell`; it keeps directory,
    variables and functions between them. `argv` may be empty: bash where there is one, else sh."""
    shell: ExecId | None = None
    """Run `argv[0]` as a command line in this open shell. `cwd`, `env`, `user` and `stdin` are then the shell's own."""


Outcome = Literal[
    "exited", "signaled", "timed_out", "cancelled", "not_found", "not_executable", "failed", "not_started", "unknown"
]
LimitName = Literal["oom", "pids", "disk_full"]


class ExecResult(_Value, frozen=True, kw_only=True):
    """How a command ended. A non-zero exit is a result, never an exception."""

    id: ExecId
    outcome: Outcome
    exit_code: int | None = None
    """The program's own exit code; 128 + signal when a signal ended it; 127, 126 when it could not start."""
    signal: int | None = None
    limit: LimitName | None = None
    """The sandbox limit that the command ran into, if any."""
    stdout_bytes: int = 0
    """Bytes the program wrote, dropped ones included."""
    stderr_bytes: int = 0
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    duration: float = 0.0
    cpu_user: float = 0.0
    cpu_system: float = 0.0
    max_rss: int = 0
    background: int = 0
    """Processes it left running in the sandbox."""
    error: ErrorBody | None = None
    """Why, when it could not be started (`failed`) or its end is not known; raised to callers."""

    @property
    def outputs(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bytes written and dropped, of output and error output."""
        return (self.stdout_bytes, self.stdout_dropped), (self.stderr_bytes, self.stderr_dropped)


class ExecInfo(_Value, frozen=True, kw_only=True):
    """A command in a sandbox's history. `result` is None while it runs, `shell` names the session that it ran in."""

    id: ExecId
    argv: tuple[bytes, ...]
    """The first of them, up to 1 KiB in all."""
    shell: ExecId | None = None
    started: float
    result: ExecResult | None = None
    stdout_recorded: int = 0
    """Bytes of its output on record so far."""
    stderr_recorded: int = 0
    """As `stdout_recorded`."""


class FileStat(_Value, frozen=True, kw_only=True):
    """One file as lstat(2) sees it inside the sandbox."""

    path: bytes
    kind: Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]
    size: int
    mode: int
    """Permission bits with set-id and sticky, 0o7777."""
    uid: int
    gid: int
    mtime_ns: int
    nlink: int = 1
    target: bytes = b""
    """Of a symlink."""


class ProcessInfo(_Value, frozen=True, kw_only=True):
    """A process of the sandbox, ids as seen inside."""

    pid: int
    ppid: int
    uid: int
    state: str
    rss: int
    argv: tuple[bytes, ...]
    exec_id: ExecId | None = None


class NodeInfo(_Value, frozen=True, kw_only=True):
    """What a node can do and how full it is."""

    name: NodeName
    backends: tuple[BackendName, ...]
    kernel: Literal["full", "reduced"]
    sandboxes: int
    capacity: int
    memory_total: int
    memory_promised: int
    disk_total: int
    disk_promised: int
    cpus_total: int = 0
    """Processors; 0 where the node does not say. A sandbox may use as many, together they may be promised any number."""
    version: str = ""
    notes: tuple[str, ...] = ()
    """One line per thing this host lacks."""
    data_mounts: tuple[str, ...] = ()
    pool: PoolInfo = PoolInfo()
    network: NetworkInfo = NetworkInfo()


HOST = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
MOST_LABEL_BYTES = 4 * KIB
"""Keys and values of one sandbox together, so that a page of sandboxes fits one answer."""


def check_spec(spec: SandboxSpec) -> SandboxSpec:
    """Refuse what the types let through. Returns the same value."""
    check_environment(spec.environment)
    for field in LIMITS:
        check_limit(field, getattr(spec.limits, field))
    check_mounts(spec.mounts)
    check_network(spec.network, spec.mounts)
    for field in ("idle_timeout", "lifetime"):
        _positive(getattr(spec, field), field)
    if not HOST.fullmatch(spec.hostname):
        raise InvalidRequest("hostname: not a host name", field="hostname")
    if spec.workdir is not None:
        check_workdir(spec.workdir)
    for field in ("env", "secrets"):
        for key, value in getattr(spec, field).items():
            check_env(key.encode(), value.encode(), field)
    if spec.user is not None:
        check_user(spec.user)
    size = sum(len(k.encode()) + len(v.encode()) for k, v in spec.labels.items())
    if len(spec.labels) > 64 or size > MOST_LABEL_BYTES:
        raise InvalidRequest(f"labels: at most 64 and {MOST_LABEL_BYTES} bytes together", field="labels")
    return spec


MOST_TIMEOUT = 4e6
"""Seconds: the guest counts milliseconds in 32 bits."""
MOST_ARGUMENT_BYTES = 1920 * KIB
"""Of arguments and environment together, 8 for each besides; the kernel takes 2 MiB for a stack of 8."""


def check_exec(request: Exec) -> Exec:
    """Refuse what the types let through. Returns the same value."""
    if not request.argv and not request.opens_shell:
        raise InvalidRequest("argv: empty", field="argv")
    _check_terminal(request)
    _check_shell(request)
    _check_argument_bytes(request)
    for item in request.argv:
        check_no_nul(item, "argv")
    for field in ("env", "secrets"):
        for key, value in getattr(request, field).items():
            check_env(key, value, field)
    if request.cwd is not None:
        check_no_nul(request.cwd, "cwd")
    if request.user is not None:
        check_user(request.user)
    if request.timeout is not None:
        _positive(request.timeout, "timeout", MOST_TIMEOUT)
    if not 0 <= request.grace <= 3600:
        raise InvalidRequest("grace: must be between 0 and 3600 seconds", field="grace")
    if not 0 <= request.output_limit < (1 << 48):
        raise InvalidRequest("output_limit: out of range", field="output_limit")
    return request


def check_workdir(path: str) -> None:
    if not path.startswith("/"):
        raise InvalidRequest("workdir: must be absolute", field="workdir")
    check_no_nul(path.encode(), "workdir")


def check_user(user: str) -> None:
    """Empty text is no user: it would mean root where somebody meant a variable that was not set."""
    if not user:
        raise InvalidRequest("user: empty", field="user", hint="leave it out for the sandbox's user")
    check_no_nul(user.encode(), "user")


def check_terminal(size: Terminal) -> Terminal:
    for field, value in (("tty.rows", size.rows), ("tty.columns", size.columns)):
        if not 1 <= value <= 0xFFFF:
            raise InvalidRequest(f"{field}: {value} is out of range", field=field, hint="1 to 65535")
    return size


def _check_terminal(request: Exec) -> None:
    if request.tty is None:
        return
    check_terminal(request.tty)
    if request.opens_shell or request.shell is not None:
        raise InvalidRequest("tty: not with a shell session", field="tty", hint="run the shell itself on a terminal")


def _check_shell(request: Exec) -> None:
    if request.shell is None:
        return
    if len(request.argv) != 1:
        raise InvalidRequest("argv: a command in a shell is one line", field="argv")
    taken = {
        "cwd": request.cwd,
        "env": request.env,
        "secrets": request.secrets,
        "user": request.user,
        "stdin": request.stdin,
        "merge_stderr": request.merge_stderr,
        "keep_background": request.keep_background,
        "opens_shell": request.opens_shell,
    }
    for field, value in taken.items():
        if value:
            raise InvalidRequest(f"{field}: belongs to the shell, not to a command in it", field=field)


def _check_argument_bytes(request: Exec) -> None:
    variables = (*request.env.items(), *request.secrets.items())
    total = sum(len(item) + 8 for item in request.argv) + sum(len(k) + len(v) + 8 for k, v in variables)
    if total > MOST_ARGUMENT_BYTES:
        raise InvalidRequest(
            f"argv and env: {total} bytes",
            field="argv",
            hint=f"at most {MOST_ARGUMENT_BYTES}; send more as a file or input",
        )


def check_env(key: bytes, value: bytes, field: str) -> None:
    if not key or b"=" in key:
        raise InvalidRequest(f"{field}: {key!r} is not a variable name", field=field)
    check_no_nul(key, field)
    check_no_nul(value, field)


def check_no_nul(value: bytes, field: str) -> None:
    if b"\0" in value:
        raise InvalidRequest(f"{field}: contains a NUL byte", field=field, hint="no program can receive one")


def _positive(value: float, field: str, most: float = 1e9) -> None:
    if not 0 < value < most:
        hint = f"a positive number of seconds below {most:,.0f}"
        raise InvalidRequest(f"{field}: {value} is out of range", field=field, hint=hint)


def node_of(sandbox: str) -> NodeName:
    """The node that a sandbox id names: everything before its last '-'."""
    node, dash, unique = sandbox.rpartition("-")
    if not dash or not NAME.fullmatch(node) or not re.fullmatch(r"[a-z0-9]{8,32}", unique):
        raise InvalidRequest(f"{sandbox!r} is not a sandbox id", field="sandbox")
    return NodeName(node)
