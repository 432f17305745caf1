"""Rows of the registry: their type, their tables in SQLite, and the table in memory that mirrors them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import apsw
import msgspec

from barchan.errors import BarchanError, InternalError, NodeStorageFull, WrongVersion
from barchan.spec import SandboxSpec, SandboxState

SCHEMA = 2
"""Counts the changes of `_TABLES`: what another version made is refused, not misread."""
ENDED = ("stopped", "failed")


class SandboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox. Times are Unix seconds."""

    id: str
    state: SandboxState
    spec: SandboxSpec
    """Secrets are keyed digests."""
    create_key: str = ""
    digest: bytes
    """Of the request."""
    pid: int = 0
    pid_start: int = 0
    """Start time of the process in clock ticks, field 22 of /proc/PID/stat."""
    cgroup: str = ""
    """`Running.place`: name of its groups, if not its id."""
    boot: str = ""
    """Boot id of the host when it was created."""
    created: float
    last_used: float
    expires: float
    ended: float = 0.0
    reason: str = ""
    ready_ms: float = 0.0
    handles: bytes = b""
    """`Running.handles`."""


class Made(TypedDict):
    """What is known of a sandbox that runs."""

    pid: int
    pid_start: int
    cgroup: str
    boot: str
    ready_ms: float
    handles: bytes


NOT_MADE = Made(pid=0, pid_start=0, cgroup="", boot="", ready_ms=0.0, handles=b"")


class Fields(TypedDict, total=False):
    """What `update` may change."""

    state: SandboxState
    spec: SandboxSpec
    pid: int
    pid_start: int
    cgroup: str
    boot: str
    last_used: float
    expires: float
    reason: str
    ready_ms: float
    handles: bytes


_COLUMNS = SandboxRow.__struct_fields__
_SPEC = _COLUMNS.index("spec")
ENCODER = msgspec.msgpack.Encoder()
_TABLES = """
CREATE TABLE sandboxes (
  id TEXT PRIMARY KEY, state TEXT NOT NULL, spec BLOB NOT NULL, create_key TEXT NOT NULL, digest BLOB NOT NULL,
  pid INTEGER NOT NULL, pid_start INTEGER NOT NULL, cgroup TEXT NOT NULL, boot TEXT NOT NULL,
  created REAL NOT NULL, last_used REAL NOT NULL, expires REAL NOT NULL, ended REAL NOT NULL, reason TEXT NOT NULL,
  ready_ms REAL NOT NULL, handles BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX sandboxes_key ON sandboxes(create_key) WHERE create_key != '';
CREATE TABLE secrets (
  sandbox TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (sandbox, name)
) STRICT, WITHOUT ROWID;
"""
_ALL = f"SELECT {', '.join(_COLUMNS)} FROM sandboxes ORDER BY created"
_CHANGING = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS if name not in ("id", "create_key"))
PUT = (
    f"INSERT INTO sandboxes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
    f" ON CONFLICT (id) DO UPDATE SET {_CHANGING}"
)
"""Not `OR REPLACE`: that would write the indices again, too."""

DROP = "DELETE FROM sandboxes WHERE id = ?"
PUT_SECRET = "INSERT INTO secrets (sandbox, name, value) VALUES (?, ?, ?)"
DROP_SECRETS = "DELETE FROM secrets WHERE sandbox = ?"
SECRETS = "SELECT name, value FROM secrets WHERE sandbox = ?"


class Promised(NamedTuple):
    """What the sandboxes that have not ended may use together. Bytes."""

    sandboxes: int = 0
    memory: int = 0
    disk: int = 0


class Table:
    """Rows by id, in order of their claims. The thread and the loop have one each, so that neither sees half a group."""

    def __init__(self, rows: Iterable[SandboxRow]) -> None:
        self.rows: dict[str, SandboxRow] = {}
        self.keys: dict[str, str] = {}
        self.live: dict[str, SandboxRow] = {}
        self.promised = Promised()
        self.ended: dict[str, float] = {}
        """When, oldest first."""
        self.merge({row.id: row for row in rows})

    def merge(self, changed: Mapping[str, SandboxRow | None]) -> None:
        for id, row in changed.items():
            self._count(id, row)
            if row is None:
                self._drop(id)
                continue
            self.rows[id] = row
            if row.create_key:
                self.keys[row.create_key] = id
            if row.ended:
                self.ended.setdefault(id, row.ended)

    def _count(self, id: str, row: SandboxRow | None) -> None:
        count, memory, disk = self.promised
        if (before := self.live.get(id)) is not None:
            count, memory, disk = count - 1, memory - before.spec.limits.memory, disk - before.spec.limits.disk
        if row is None or row.ended:
            self.live.pop(id, None)
        else:
            self.live[id] = row
            count, memory, disk = count + 1, memory + row.spec.limits.memory, disk + row.spec.limits.disk
        self.promised = Promised(count, memory, disk)

    def _drop(self, id: str) -> None:
        row = self.rows.pop(id, None)
        self.ended.pop(id, None)
        if row and row.create_key:
            self.keys.pop(row.create_key, None)


def load(path: Path) -> tuple[apsw.Connection, list[SandboxRow]]:
    try:
        _make_private(path)
        connection = apsw.Connection(str(path))
        connection.set_busy_timeout(5000)
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}")
        _make_tables(connection, path)
        return connection, [_row(values) for values in connection.execute(_ALL)]
    except apsw.Error as error:
        raise named(error) from error
    except OSError as error:
        raise InternalError(f"{path} cannot be opened: {error.strerror}") from error


def _make_private(path: Path) -> None:
    """SQLite gives its other files the mode of this one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def check_version(path: Path) -> None:
    """Raises `WrongVersion` for a registry that this version cannot read. None at all is fine; so is a damaged one, here."""
    with suppress(apsw.Error):
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            _known_version(connection, path)
        finally:
            connection.close()


def _known_version(connection: apsw.Connection, path: Path) -> int:
    """Of its tables; 0 when there are none yet."""
    version = int(connection.pragma("user_version"))
    if version not in (0, SCHEMA):
        which, data = "an older" if version < SCHEMA else "a newer", path.parent
        raise WrongVersion(
            f"{data} was made by {which} barchan: its tables have version {version}, here they have {SCHEMA}",
            hint=f"start the barchan that made it, or delete all of it: `barchan down --delete --data {shlex.quote(str(data))}`",
        )
    return version


def _make_tables(connection: apsw.Connection, path: Path) -> None:
    if _known_version(connection, path) == 0:
        with connection:
            connection.execute(_TABLES)
            connection.pragma("user_version", SCHEMA)


def stored(row: SandboxRow) -> tuple[Any, ...]:
    values = list(msgspec.structs.astuple(row))
    values[_SPEC] = ENCODER.encode(row.spec)
    return tuple(values)


def _row(values: tuple[Any, ...]) -> SandboxRow:
    fields = dict(zip(_COLUMNS, values, strict=True))
    try:
        fields["spec"] = msgspec.msgpack.decode(fields["spec"], type=SandboxSpec)
        return SandboxRow(**fields)
    except msgspec.MsgspecError as error:
        raise InternalError(f"registry: sandbox {fields['id']} cannot be read: {error}") from error


def named(error: apsw.Error) -> BarchanError:
    if isinstance(error, apsw.FullError):
        return NodeStorageFull("no space left for the registry", hint="free space below the data directory")
    return InternalError(f"registry: {error}")
