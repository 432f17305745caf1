"""What must be known of the log without reading it: the last record of each live sandbox and the state of its commands.

Built by applying records in order, at start from the log and then one by one as they are staged, so both ways give
the same. Entries are frozen and replaced, never changed: another thread may hold one. Changes since `begin` are undone by `rollback`
when the group of records they stand for could not be written. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeVar

import msgspec

from barchan.errors import LogCorrupt
from barchan.trajectory.record import (
    OPERATION,
    ExecBegun,
    Input,
    InputEnd,
    Kind,
    Output,
    PackBegun,
    PackEnded,
    Position,
    Record,
)

RECORD = 128
"""Bytes that a record takes beside its data."""


class ExecState(msgspec.Struct, frozen=True, gc=False):
    """A command as far as it is recorded; about 0.5 KB each."""

    id: str
    seq: int
    """Of its begin; the guest's operation id."""
    digest: bytes
    """Of the request."""
    started: float
    """Unix seconds."""
    first: Position
    """Of its begin."""
    newest: Position
    """Of its end, once `ended`."""
    ended: bool = False
    stdout: int = 0
    """Bytes recorded."""
    stderr: int = 0
    stdin: int = 0
    stdin_ended: bool = False

    def recorded(self, stream: int) -> int:
        """Bytes recorded of stream 0 (input), 1 or 2."""
        return (self.stdin, self.stdout, self.stderr)[stream]


class PackState(msgspec.Struct, frozen=True, gc=False):
    """A packing of a sandbox's changes that is under way, or made a layer. One that failed left nothing, and is forgotten."""

    digest: bytes
    """Of the request."""
    first: Position
    """Of its begin."""
    end: Position | None = None


class SandboxState(msgspec.Struct, frozen=True):
    """`newest` is the newest record that belongs to no operation."""

    last_seq: int = 0
    newest: Position | None = None
    stopped: bool = False
    size: int = 0
    """Bytes that its records take in the log, about: its input and output, and `RECORD` for each."""


Change = tuple[str, ExecState]
"""Of a sandbox, the new state of one of its commands."""


class Index:
    def __init__(self, live: Collection[str] = ()) -> None:
        self.sandboxes: dict[str, SandboxState] = {name: SandboxState() for name in live}
        self.execs: dict[str, dict[str, ExecState]] = {name: {} for name in live}
        self.files: dict[str, dict[int, tuple[str, Position]]] = {name: {} for name in live}
        """File operations under way: by seq their key and the position of their begin."""
        self.packs: dict[str, dict[str, PackState]] = {name: {} for name in live}
        """By key."""
        self.count = 0
        """Commands and packings in it."""
        self._old_sandboxes: dict[str, SandboxState | None] = {}
        self._old_execs: dict[tuple[str, str], ExecState | None] = {}
        self._old_files: dict[tuple[str, int], tuple[str, Position] | None] = {}
        self._old_packs: dict[tuple[str, str], PackState | None] = {}

    def begin(self) -> None:
        self._old_sandboxes.clear()
        self._old_execs.clear()
        self._old_files.clear()
        self._old_packs.clear()

    def changes(self) -> list[Change]:
        """Commands that changed since `begin`, with their present state."""
        return [(sandbox, self.execs[sandbox][id_]) for sandbox, id_ in self._old_execs]

    def rollback(self) -> None:
        for (sandbox, id_), exec_ in self._old_execs.items():
            _restore(self.execs[sandbox], id_, exec_)
            self.count -= exec_ is None
        for (sandbox, seq), file in self._old_files.items():
            _restore(self.files[sandbox], seq, file)
        for (sandbox, key), pack in self._old_packs.items():
            self.count += (pack is not None) - (key in self.packs[sandbox])
            _restore(self.packs[sandbox], key, pack)
        for sandbox, state in self._old_sandboxes.items():
            _restore(self.sandboxes, sandbox, state)
            if state is None:
                del self.execs[sandbox], self.files[sandbox], self.packs[sandbox]
        self.begin()

    def forget(self, sandbox: str) -> None:
        """Not undone by `rollback`; call it before `begin`."""
        if self.sandboxes.pop(sandbox, None):
            self.count -= len(self.execs.pop(sandbox)) + len(self.packs.pop(sandbox))
            del self.files[sandbox]

    def apply(self, position: Position, record: Record) -> None:
        """Take in the next record; one of a sandbox that is not in the index, and is not created by it, is passed over."""
        name = record.sandbox
        state = self.sandboxes.get(name)
        if state is None:
            return
        if record.seq != state.last_seq + 1:
            raise LogCorrupt(
                f"sandbox {name}: record {record.seq} follows {state.last_seq} at {position.segment}:{position.offset}"
            )
        self._old_sandboxes.setdefault(name, state)
        newest = state.newest if record.kind in OPERATION else position
        size = state.size + _size(record)
        self.sandboxes[name] = SandboxState(record.seq, newest, state.stopped or record.kind == Kind.STOP, size)
        self._apply_operation(position, record)

    def add(self, sandbox: str) -> None:
        """Before its first record."""
        self._old_sandboxes[sandbox] = None
        self.sandboxes[sandbox] = SandboxState()
        self.execs[sandbox] = {}
        self.files[sandbox] = {}
        self.packs[sandbox] = {}

    def _apply_operation(self, position: Position, record: Record) -> None:
        if record.kind == Kind.FILE:
            self._set_file(record.sandbox, record.seq, (record.key, position))
        elif record.kind == Kind.FILE_END:
            self._end_file(record)
        elif isinstance(record.body, PackBegun):
            self._set_pack(record, PackState(record.body.digest, position))
        elif isinstance(record.body, PackEnded):
            self._end_pack(position, record, record.body)
        elif isinstance(record.body, ExecBegun):
            started = record.time_ns / 1e9
            state = ExecState(record.key, record.seq, record.body.digest, started, position, position)
            self._set_exec(record.sandbox, state)
        elif old := self.execs[record.sandbox].get(record.key):
            self._set_exec(record.sandbox, _advanced(old, position, record))

    def _set_exec(self, sandbox: str, state: ExecState) -> None:
        execs = self.execs[sandbox]
        old = execs.get(state.id)
        self._old_execs.setdefault((sandbox, state.id), old)
        self.count += old is None
        execs[state.id] = state

    def _set_file(self, sandbox: str, seq: int, value: tuple[str, Position]) -> None:
        self._old_files.setdefault((sandbox, seq), None)
        self.files[sandbox][seq] = value

    def _end_file(self, record: Record) -> None:
        """A file operation's end carries the position of its begin, nothing else names it."""
        files = self.files[record.sandbox]
        for seq, (_, position) in files.items():
            if position == record.previous:
                self._old_files.setdefault((record.sandbox, seq), files[seq])
                del files[seq]
                return

    def _set_pack(self, record: Record, state: PackState | None) -> None:
        packs = self.packs[record.sandbox]
        old = packs.get(record.key)
        self._old_packs.setdefault((record.sandbox, record.key), old)
        self.count += (state is not None) - (old is not None)
        _restore(packs, record.key, state)

    def _end_pack(self, position: Position, record: Record, body: PackEnded) -> None:
        old = self.packs[record.sandbox].get(record.key)
        if old is not None and old.first == record.previous:
            self._set_pack(record, msgspec.structs.replace(old, end=position) if body.packed is not None else None)


K = TypeVar("K")
V = TypeVar("V")


def _restore(table: dict[K, V], key: K, old: V | None) -> None:
    """None: it is not there."""
    if old is None:
        table.pop(key, None)
    else:
        table[key] = old


def _size(record: Record) -> int:
    body = record.body
    return RECORD + len(body.data) if isinstance(body, Output | Input) else RECORD


def _advanced(old: ExecState, position: Position, record: Record) -> ExecState:
    match record.body:
        case Output(stream=1, offset=offset, data=data):
            return msgspec.structs.replace(old, newest=position, stdout=offset + len(data))
        case Output(offset=offset, data=data):
            return msgspec.structs.replace(old, newest=position, stderr=offset + len(data))
        case Input(offset=offset, data=data):
            return msgspec.structs.replace(old, newest=position, stdin=offset + len(data))
        case InputEnd():
            return msgspec.structs.replace(old, newest=position, stdin_ended=True)
        case _:
            return msgspec.structs.replace(old, newest=position, ended=record.kind == Kind.EXEC_END)


class Rebuilt(NamedTuple):
    """Commands of one sandbox whose begin is kept. `whole`: and so is everything else of it."""

    execs: dict[str, ExecState]
    whole: bool
    segments: frozenset[int]
    """That hold its records."""


def rebuild(sandbox: str, records: Iterable[tuple[Position, Record]]) -> Rebuilt:
    """From the records of a sandbox that are kept, up to its stop."""
    index, whole, segments = Index([sandbox]), True, set()
    for position, record in records:
        if record.seq != index.sandboxes[sandbox].last_seq + 1:
            whole = False
            index.sandboxes[sandbox] = msgspec.structs.replace(index.sandboxes[sandbox], last_seq=record.seq - 1)
        index.apply(position, record)
        index.begin()  # nothing is undone
        segments.add(position.segment)
        if record.kind == Kind.STOP:
            break
    return Rebuilt(index.execs[sandbox], whole and index.sandboxes[sandbox].stopped, frozenset(segments))
