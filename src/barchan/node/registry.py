"""The sandboxes of a node, in SQLite: what a restarted agent must know to take them up again.

Changes are made by one thread, a group of them per transaction (WAL, synchronous=NORMAL). What must survive a power cut
waits until the WAL was synced, with all that was committed before; what concerns a sandbox that the power cut ends too does not. Reads are answered from memory, where every row is held. Values marked secret are kept in a table of their own,
readable by root alone as the whole data directory is, because later commands need them; they are erased
(secure_delete) in the transaction that records the sandbox's end. A row holds keyed digests in their place.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, Unpack, cast

import apsw
import msgspec

from barchan.config import Layout
from barchan.errors import BarchanError, Conflict, InternalError, SandboxNotFound
from barchan.node.rows import (
    DROP,
    DROP_SECRETS,
    ENCODER,
    ENDED,
    NOT_MADE,
    PUT,
    PUT_SECRET,
    SECRETS,
    Fields,
    Made,
    Promised,
    SandboxRow,
    Table,
    load,
    named,
    stored,
)
from barchan.node.writer import Acknowledge, Job, Writer, by_need
from barchan.spec import SandboxSpec, SandboxState
from barchan.trajectory.redact import Redactor

__all__ = ["Claim", "Registry", "SandboxRow"]

HISTORY, HISTORY_SECONDS = 10_000, 86400.0
"""How many ended sandboxes are remembered, and for how long."""
DIGESTS = 256
"""Of different requests, remembered."""
TOUCH_SECONDS = 20.0
"""Uses are on disk after this time at the latest, plus one commit."""


class Claim(NamedTuple):
    row: SandboxRow
    fresh: bool
    """False when the key was claimed before."""
    synced: asyncio.Future[None]
    """Done once a power cut cannot undo it: what the sandbox's commands have done is found by its entry."""


class Registry:
    """Use as a context manager: `async with await Registry.open(…)`."""

    def __init__(
        self,
        connection: apsw.Connection,
        wal: int,
        rows: Sequence[SandboxRow],
        redactor: Redactor,
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._wal = wal
        """The WAL's descriptor. This connection is the only one, so that it stays the same file."""
        self._redactor = redactor
        self._clock = clock
        self._table = Table(rows)
        self._digests: dict[bytes, bytes] = {}
        self._staged: dict[str, SandboxRow | None] = {}
        self._view = Table(rows)
        self._touched: dict[str, float] = {}
        self._flush: asyncio.TimerHandle | None = None
        self._writer = Writer("registry", self._commit, self._view.merge)

    @classmethod
    async def open(
        cls, layout: Layout, redactor: Redactor | None = None, *, clock: Callable[[], float] = time.time
    ) -> Self:
        """Load every row. Raises `NodeStorageFull`, `InternalError` for a damaged file, and `WrongVersion`."""
        if redactor is None:
            redactor = await asyncio.to_thread(Redactor.load, layout.data)
        connection, rows = await asyncio.to_thread(load, layout.registry)
        wal = os.open(f"{layout.registry}-wal", os.O_RDONLY | os.O_CLOEXEC)
        return cls(connection, wal, rows, redactor, clock)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Write what was submitted and the last uses. Safe twice."""
        if self._writer.closed:
            return
        try:
            await self._flush_touched()
        finally:
            await self._writer.close()
            await asyncio.to_thread(self._connection.close)
            os.close(self._wal)

    # --- changes

    async def claim(
        self,
        id: str,
        spec: SandboxSpec,
        *,
        asked: SandboxSpec | None = None,
        create_key: str = "",
        created: float,
        expires: float,
        state: SandboxState = "creating",
        made: Made | None = None,
    ) -> Claim:
        """Insert a sandbox, with what is known of one that runs already, or answer with the one that has the key already.

        It returns when that outlives this process; `Claim.synced` says when it outlives the host. Raises `Conflict` when key or id stand for
        another request: `asked` is what was settled to `spec`, if that is not the same.
        """
        redacted = self._redactor.spec(spec)
        wanted = redacted if asked is None else self._redactor.spec(asked)
        row = SandboxRow(
            id=id,
            state=state,
            spec=redacted,
            create_key=create_key,
            digest=self._digest(wanted),
            created=created,
            last_used=created,
            expires=expires,
            **(made or NOT_MADE),
        )

        def run() -> tuple[SandboxRow, bool]:
            if known := self._claimed(row):
                return known, False
            self._staged[id] = row
            if spec.secrets:
                self._connection.executemany(PUT_SECRET, [(id, name, value) for name, value in spec.secrets.items()])
            return row, True

        claimed, synced = self._submit(run, durable=False), self._submit(_nothing)
        synced.add_done_callback(_retrieved)
        holder, fresh = await claimed
        return Claim(holder, fresh, synced)

    def update(
        self,
        id: str,
        *,
        when: tuple[SandboxState, ...] = (),
        durable: bool = True,
        hurried: bool = True,
        **fields: Unpack[Fields],
    ) -> asyncio.Future[SandboxRow]:
        """Change a row. `Conflict` if its state is none of `when` (empty: any), `SandboxNotFound` if there is none.

        Not `durable`: a power cut may undo it, the end of the agent does not. Not `hurried`: it is written with the next
        change, or some 20 ms later.

        A new `spec` keeps the secrets that there were. A row that has ended stays ended, and has no secrets any more.
        """

        def run() -> SandboxRow:
            row = self._current(id)
            if row is None:
                raise SandboxNotFound(f"no sandbox {id} on this node")
            if when and row.state not in when:
                raise Conflict(f"sandbox {id} is {row.state}", field="state")
            changed = self._changed(row, fields)
            if changed.ended and not row.ended and row.spec.secrets:
                self._connection.execute(DROP_SECRETS, (id,))
            self._staged[id] = changed
            return changed

        job = Job(run, durable=durable)
        return self._writer.submit(job) if hurried else self._writer.join(job)

    async def remove(self, id: str) -> None:
        """Forget a sandbox, its key and its secrets. None of that name is fine."""
        await self._submit(lambda: self._remove(id))

    def touch(self, id: str, now: float) -> None:
        """It was used: in memory at once, on disk with the next flush."""
        row = self._view.rows.get(id)
        if row is None or now <= self._last_used(row):
            return
        self._touched[id] = now
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(TOUCH_SECONDS, self._flush_touched)

    # --- reads

    def get(self, id: str) -> SandboxRow | None:
        row = self._view.rows.get(id)
        return self._used(row) if row else None

    def by_key(self, create_key: str) -> SandboxRow | None:
        return self.get(self._view.keys.get(create_key, ""))

    def rows(self) -> list[SandboxRow]:
        """All, the ended ones that are remembered too, in order of their claims."""
        return [self._used(row) for row in self._view.rows.values()]

    def live(self) -> list[SandboxRow]:
        """Neither stopped nor failed."""
        return [self._used(row) for row in self._view.live.values()]

    @property
    def promised(self) -> Promised:
        return self._view.promised

    async def secrets(self, id: str) -> dict[str, str]:
        """Values; empty once the sandbox has ended."""
        return cast(dict[str, str], await self._submit(lambda: dict(self._connection.execute(SECRETS, (id,)))))

    # --- in the thread

    def _commit(self, jobs: list[Job], acknowledge: Acknowledge) -> None:
        """One transaction for the group. A job that fails leaves no trace in it; a transaction that fails, none of any."""
        self._staged = {}
        try:
            with self._connection:
                for job in jobs:
                    _attempt(job)
                self._purge()
                self._connection.executemany(PUT, [stored(row) for row in self._staged.values() if row])
        except apsw.Error as error:
            raise named(error) from error
        self._table.merge(self._staged)
        early, late = by_need(jobs)
        acknowledge(early, self._staged)
        if late:
            self._sync()
            acknowledge(late, {})

    def _sync(self) -> None:
        try:
            os.fdatasync(self._wal)
        except OSError as error:
            raise InternalError(f"registry: sync: {error.strerror}") from error

    def _claimed(self, wanted: SandboxRow) -> SandboxRow | None:
        known = self._holder(wanted.create_key)
        if known and known.digest != wanted.digest:
            raise Conflict("this key was used to create a different sandbox", hint="use a new key", field="key")
        if known is None and self._current(wanted.id):
            raise Conflict(f"sandbox {wanted.id} exists already", field="id")
        return known

    def _holder(self, create_key: str) -> SandboxRow | None:
        if not create_key:
            return None
        staged = (row for row in self._staged.values() if row and row.create_key == create_key)
        return next(staged, None) or self._current(self._table.keys.get(create_key, ""))

    def _current(self, id: str) -> SandboxRow | None:
        return self._staged[id] if id in self._staged else self._table.rows.get(id)

    def _changed(self, row: SandboxRow, fields: Fields) -> SandboxRow:
        changed = msgspec.structs.replace(row, **fields)
        if changed.spec is not row.spec:
            spec = msgspec.structs.replace(changed.spec, secrets=row.spec.secrets)
            changed = msgspec.structs.replace(changed, spec=spec)
        ended = row.ended or (self._clock() if changed.state in ENDED else 0.0)
        return changed if ended == changed.ended else msgspec.structs.replace(changed, ended=ended)

    def _remove(self, id: str) -> None:
        self._connection.execute(DROP_SECRETS, (id,))
        self._connection.execute(DROP, (id,))
        self._staged[id] = None

    def _purge(self) -> None:
        """Drop ended ones beyond the bounds, oldest first."""
        excess, oldest = len(self._table.ended) - HISTORY, self._clock() - HISTORY_SECONDS
        for id, ended in self._table.ended.items():
            if excess <= 0 and ended > oldest:
                break
            excess -= 1
            if id not in self._staged:
                self._remove(id)

    def _store_uses(self, touched: dict[str, float]) -> None:
        for id, now in touched.items():
            row = self._current(id)
            if row and row.last_used < now:
                self._staged[id] = msgspec.structs.replace(row, last_used=now)

    # --- in the loop

    def _digest(self, redacted: SandboxSpec) -> bytes:
        """Of a request; many ask for the same."""
        encoded = ENCODER.encode(redacted)
        digest = self._digests.get(encoded)
        if digest is None:
            if len(self._digests) >= DIGESTS:
                self._digests.clear()
            digest = self._digests[encoded] = self._redactor.digest(redacted)
        return digest

    def _submit(self, run: Callable[[], Any], *, durable: bool = True) -> asyncio.Future[Any]:
        return self._writer.submit(Job(run, durable=durable))

    def _flush_touched(self) -> asyncio.Future[Any]:
        if self._flush:
            self._flush.cancel()
        self._flush = None
        touched = dict(self._touched)
        stored = self._submit(lambda: self._store_uses(touched))
        stored.add_done_callback(lambda stored: self._flushed(touched, stored))
        return stored

    def _flushed(self, touched: dict[str, float], stored: asyncio.Future[Any]) -> None:
        """What could not be stored stays in memory, for the flush that the next use starts."""
        if not stored.cancelled() and stored.exception() is None:
            self._touched = {id: now for id, now in self._touched.items() if touched.get(id) != now}

    def _last_used(self, row: SandboxRow) -> float:
        return max(row.last_used, self._touched.get(row.id, 0.0))

    def _used(self, row: SandboxRow) -> SandboxRow:
        if row.id not in self._touched:
            return row
        return msgspec.structs.replace(row, last_used=self._last_used(row))


def _nothing() -> None:
    """Of a job that only waits."""


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Nobody may be waiting for it."""
    if not future.cancelled():
        future.exception()


def _attempt(job: Job) -> None:
    try:
        job.value = job.run()
    except BarchanError as error:
        job.error = error
