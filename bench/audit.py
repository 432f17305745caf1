"""After a round: is everything that was acknowledged still true? Asked through the SDK, then read from the disk.

Every function returns what is wrong, one line each; nothing is fine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from barchan import BarchanError, Client, ExecNotFound, FileMissing, Sandbox, SandboxInfo
from barchan.errors import SandboxError
from barchan.pools import PoolInfo
from barchan.spec import SandboxId
from barchan.trajectory.log import Log
from barchan.trajectory.record import ExecEnded, Kind, Output, Position, Record
from bench import leaks
from bench.ledger import Entry, content, numbered, script
from bench.load import COPY, IDLE

BACK = 60.0
"""Seconds until a server whose parts were killed must serve again; its supervisor waits 10 s at most."""
LATE = 5.0
"""Seconds after its due time by which an idle sandbox must be gone."""
END = 30.0
TOLERATED = frozenset(("create_failed", "sandbox_unavailable", "sandbox_stopped", "outcome_unknown", "retried"))
"""Failures that a death explains; `_explained` says which. `retried`: the user was told that it may be tried again."""


@dataclass
class Box:
    """What the ledger knows of one sandbox."""

    key: str
    sandbox: str = ""
    created: bool = False
    pid: int = 0
    """Of its first process."""
    stopping: bool = False
    stopped: bool = False
    written: bool = False
    writing: bool = False
    asked: dict[str, Entry] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    failed: list[Entry] = field(default_factory=list)


@dataclass
class Told:
    """The ledger of a round, by sandbox."""

    boxes: dict[str, Box]
    guests: set[int]
    """First processes of sandboxes that were killed."""
    killed: Counter[str]
    wrong: list[str]

    def died(self, box: Box) -> bool:
        """One that was already dying when its create was answered has no pid."""
        return box.pid in self.guests or (box.created and not box.pid and bool(self.guests))


def told(entries: Iterable[Entry]) -> Told:
    result = Told({}, set(), Counter(), [])
    for entry in entries:
        if entry.what == "killing":
            result.killed[entry.verb] += 1
            result.guests |= {entry.pid} if entry.verb == "guest" else set()
        elif entry.what == "wrong":
            result.wrong.append(f"client {entry.client}, {entry.box} {entry.sandbox}: {entry.text}")
        elif entry.box:
            _take(result.boxes.setdefault(entry.box, Box(entry.box)), entry)
    return result


def _take(box: Box, entry: Entry) -> None:
    box.sandbox = entry.sandbox or box.sandbox
    if entry.what == "running":
        box.asked[entry.id] = entry
    elif entry.what == "ran":
        box.ran.add(entry.id)
    elif entry.what == "failed":
        box.failed.append(entry)
    box.created |= entry.what == "created"
    box.pid = entry.pid or box.pid
    box.stopping |= entry.what == "stopping"
    box.stopped |= entry.what == "stopped"
    box.writing |= entry.what == "writing"
    box.written |= entry.what == "wrote"


def failures(told: Told) -> list[str]:
    """Failures that no kill explains."""
    return [
        f"{box.key} {box.sandbox}: {entry.verb} failed without a reason: {entry.code}: {entry.text}"
        for box in told.boxes.values()
        for entry in box.failed
        if not _explained(told, box, entry)
    ]


def _explained(told: Told, box: Box, entry: Entry) -> bool:
    if entry.code == "create_failed":  # its agent, its spawner or its first process died meanwhile
        return bool(told.killed["node"] + told.killed["spawner"] + told.killed["guest"])
    if entry.code in ("sandbox_unavailable", "sandbox_stopped", "outcome_unknown"):
        return told.died(box)
    return entry.code in TOLERATED


# --- through the SDK


async def serving(client: Client) -> None:
    """Wait until API and node are there."""
    end = time.monotonic() + BACK
    while True:
        try:
            if await client.nodes():
                return
        except BarchanError:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(0.05)


async def survivors(data: Path, told: Told, tag: str) -> list[str]:
    """All that should live does, is usable and remembers everything; the rest is gone. Ends all of them."""
    async with Client(data=data) as client:
        await serving(client)
        listed = await _settled(client, told, tag)
        wrong = _presence(told, listed)
        found = [(told.boxes[info.labels["box"]], await client.get(info.id)) for info in listed]
        used = [_checked(box, sandbox) for box, sandbox in found if not box.stopping]
        wrong += [line for lines in await asyncio.gather(*used) for line in lines]
        idle = {sandbox.id for box, sandbox in found if box.stopping or _left_alone(sandbox)}
        await asyncio.gather(*(_expire(sandbox) for box, sandbox in found if box.stopping))
        await asyncio.gather(*(sandbox.stop() for _, sandbox in found if sandbox.id not in idle))
        wrong += await _reaped(client, idle) + [f"{i.id} is not gone" for i in await client.list({"kill": tag})]
        pool = await at_rest(client, data)
        if (ahead := leaks.ahead(data, instance_of(data))) != pool.ready + pool.parked:
            wrong.append(
                f"{ahead} places were made ahead, the node knows of {pool.ready} ready and {pool.parked} parked"
            )
        return wrong


async def at_rest(client: Client, data: Path) -> PoolInfo:
    """What the node holds ready, once there is exactly that on its host; the last it said when that takes too long."""
    end = time.monotonic() + END
    while True:
        pool = (await client.nodes())[0].pool
        names = {name for _, name in leaks.places(data, instance_of(data))}
        if len(names) == pool.ready + pool.parked == leaks.ahead(data, instance_of(data)) or time.monotonic() > end:
            return pool
        await asyncio.sleep(0.1)


def instance_of(data: Path) -> str:
    return (data / "instance").read_text().strip()


async def _settled(client: Client, told: Told, tag: str) -> list[SandboxInfo]:
    """The listing once nothing is being made or removed and killed guests are seen to be dead."""
    end = time.monotonic() + END
    while True:
        listed = list(await client.list({"kill": tag}))
        moving = [i for i in listed if i.state != "ready" or i.pid in told.guests]
        if not moving or time.monotonic() > end:
            return [i for i in listed if i not in moving or time.monotonic() > end]
        await asyncio.sleep(0.1)


def _presence(told: Told, listed: list[SandboxInfo]) -> list[str]:
    names = Counter(info.labels["box"] for info in listed)
    wrong = [f"{key}: {n} sandboxes of one key" for key, n in names.items() if n > 1]
    wrong += [f"{info.id} is {info.state}" for info in listed if info.state != "ready"]
    for box in told.boxes.values():
        if box.created and not box.stopping and not told.died(box) and not names[box.key]:
            wrong.append(f"{box.key}: {box.sandbox} was created, nobody stopped it, and it is gone")
        if box.stopped and names[box.key]:
            wrong.append(f"{box.key}: {box.sandbox} was stopped and is still there")
    return wrong


def _left_alone(sandbox: Sandbox) -> bool:
    """Some are left to their idle time-out, as those of a client that died for good."""
    return sandbox.id[-1] in "048c"


async def _expire(sandbox: Sandbox) -> None:
    """Its client had asked for its end; whether that ever arrived is not known. It may be gone meanwhile."""
    with contextlib.suppress(SandboxError):
        await sandbox.renew(idle_timeout=IDLE)


async def _checked(box: Box, sandbox: Sandbox) -> list[str]:
    try:
        async with asyncio.timeout(END * 2):
            wrong = [line async for line in _remembered(box, sandbox)]
            if _left_alone(sandbox):
                await sandbox.renew(idle_timeout=IDLE)
    except (BarchanError, TimeoutError) as error:
        return [f"{box.key}: survivor {sandbox.id} cannot be used: {type(error).__name__} {error}"]
    return [f"{box.key} {sandbox.id}: {line}" for line in wrong]


async def _remembered(box: Box, sandbox: Sandbox) -> AsyncIterator[str]:
    if (await sandbox.run(["/bin/true"])).exit_code != 0:
        yield "does not run a command"
    for id, entry in box.asked.items():
        if line := await _command(sandbox, entry, id in box.ran):
            yield f"{id}: {line}"
    unpiped = [entry for id, entry in box.asked.items() if id in box.ran and not entry.piped]
    for entry in unpiped[-1:]:
        again = await sandbox.run(script(entry), id=entry.id)
        if again.stdout != numbered(entry.id, entry.lines) or again.exit_code != entry.exit:
            yield f"{entry.id}: asked for again, it answers otherwise"
    for line in _counted(box, await _read(sandbox, "/count")):
        yield line
    if box.writing and (copy := await _read(sandbox, COPY)) != content(box.key) and (copy or box.written):
        yield f"{COPY} has {len(copy)} bytes, expected {len(content(box.key))}"


async def _command(sandbox: Sandbox, entry: Entry, acknowledged: bool) -> str:
    """Ask for it again by its id. One that was not acknowledged may never have run."""
    try:
        process = await sandbox.attach(entry.id)
    except ExecNotFound:
        return "acknowledged and now unknown" if acknowledged else ""
    if not acknowledged and entry.piped:
        await process.cancel()  # whoever sent it its input may be dead
    out, result = await process.stdout.read_all(), await process.wait()
    if result.outcome == "cancelled" and not acknowledged:
        return "" if numbered(entry.id, entry.lines).startswith(out) else "cancelled, with output of its own"
    if (result.outcome, result.exit_code) != ("exited", entry.exit):
        return f"its result is now {result.outcome} {result.exit_code}, expected exit code {entry.exit}"
    return "" if out == numbered(entry.id, entry.lines) else f"its {len(out)} bytes of output are not what it wrote"


def _counted(box: Box, count: bytes) -> Iterator[str]:
    times = Counter(count.decode().split())
    yield from (f"{id} ran {n} times" for id, n in times.items() if n > 1)
    yield from (f"{id} was acknowledged and did not run" for id in box.ran - set(times))
    yield from (f"{id} ran, nobody asked" for id in set(times) - set(box.asked))


async def _read(sandbox: Sandbox, path: str) -> bytes:
    try:
        return await sandbox.files.read(path)
    except FileMissing:
        return b""


async def _reaped(client: Client, left: set[SandboxId]) -> list[str]:
    """Gone by themselves in time."""
    end = time.monotonic() + IDLE + LATE
    while left and time.monotonic() < end:
        await asyncio.sleep(0.1)
        left &= {info.id for info in await client.list()}
    return [f"{id} is idle and not gone {LATE:g} s after it was due" for id in left]


# --- from the disk, once the server is down


def registry(database: Path) -> list[str]:
    """Every row has ended, no key has two, no secret is left."""
    connection = sqlite3.connect(database)
    try:
        rows = connection.execute("SELECT id, state, ended, create_key FROM sandboxes").fetchall()
        secrets = connection.execute("SELECT count(*) FROM secrets").fetchone()[0]
    finally:
        connection.close()
    wrong = [
        f"registry: {id} is {state}" for id, state, ended, _ in rows if state not in ("stopped", "failed") or not ended
    ]
    keys = Counter(key for _, _, _, key in rows if key)
    wrong += [f"registry: {n} rows of key {key}" for key, n in keys.items() if n > 1]
    return wrong + ([f"registry: {secrets} secrets of ended sandboxes"] if secrets else [])


class Trajectory:
    """What the log says of the commands of a round."""

    def __init__(self, told: Told) -> None:
        self._sandboxes = {box.sandbox: box for box in told.boxes.values() if box.sandbox}
        self._seq: Counter[str] = Counter()
        self._output: dict[str, bytearray] = {}
        self._ends: dict[str, ExecEnded] = {}
        self._begun: Counter[str] = Counter()
        self._stopped: Counter[str] = Counter()
        self.wrong: list[str] = []

    def visit(self, position: Position, record: Record) -> None:
        if record.sandbox not in self._sandboxes:
            return
        self._seq[record.sandbox] += 1
        if record.seq != self._seq[record.sandbox]:
            self.wrong.append(f"log: record {record.seq} of {record.sandbox} follows {self._seq[record.sandbox] - 1}")
            self._seq[record.sandbox] = record.seq
        self._begun[record.key] += record.kind == Kind.EXEC_BEGIN
        self._stopped[record.sandbox] += record.kind == Kind.STOP
        if isinstance(record.body, Output) and record.body.stream == 1:
            have = self._output.setdefault(record.key, bytearray())
            if record.body.offset != len(have):
                self.wrong.append(
                    f"log: output of {record.key} goes on at {record.body.offset} after {len(have)} bytes"
                )
            have += record.body.data
        elif isinstance(record.body, ExecEnded):
            if record.key in self._ends:
                self.wrong.append(f"log: {record.key} ended twice")
            self._ends[record.key] = record.body

    def missing(self) -> Iterator[str]:
        """Acknowledged, and not there."""
        yield from (f"log: {key} began {n} times" for key, n in self._begun.items() if n > 1)
        yield from (f"log: {id} stopped {self._stopped[id]} times" for id in self._seq if self._stopped[id] != 1)
        for sandbox, box in self._sandboxes.items():
            if box.created and not self._seq[sandbox]:
                yield f"log: nothing of {sandbox}"
            yield from (line for id in box.ran if (line := self._lost(box.asked[id])))

    def _lost(self, entry: Entry) -> str:
        end = self._ends.get(entry.id)
        if end is None:
            return f"log: no end of {entry.id}, which was acknowledged"
        if end.result.exit_code != entry.exit:
            return f"log: {entry.id} ended with {end.result.exit_code}, acknowledged was {entry.exit}"
        if bytes(self._output.get(entry.id, b"")) != numbered(entry.id, entry.lines):
            return f"log: the output of {entry.id} is not what was acknowledged"
        return ""


def trajectory(log: Path, told: Told, since: float) -> list[str]:
    """`since`: Unix seconds when the round began."""
    found = Trajectory(told)
    with Log.open(log, 64 << 20, visit=found.visit, since=since):
        pass
    return [*found.wrong, *found.missing()]
