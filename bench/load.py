"""One client of the kill matrix, as its user would write it: makes sandboxes, uses them, stops most of them.

Runs as `python -m bench.load JSON` (`Share`). What it asks and what is acknowledged goes to the ledger; a failure that is typed
is noted there, anything else, wrong bytes and a missing answer as `wrong`. It may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from barchan import ApiUnavailable, BarchanError, Client, Limits, Sandbox
from bench.ledger import Entry, Ledger, What, content, numbered, script

T = TypeVar("T")
MIB = 1 << 20
SMALL = Limits(memory=64 * MIB, pids=64, disk=16 * MIB)
AT_ONCE = 6
PATIENCE = 90.0
"""Seconds for one thing that is asked; above what the SDK itself waits for a server that comes back."""
IDLE = 2.0
KEPT = 600.0
TRIES = 60
COPY = "/copy"

Verb = Literal["count", "again", "stream", "pipe", "put", "get", "recreate", "look"]
Ending = Literal["stop", "keep", "idle"]
VERBS: tuple[Verb, ...] = ("count", "again", "stream", "pipe", "put", "get", "recreate", "look")
LINES_OF = {"created": 2, "count": 2, "again": 0, "stream": 2, "pipe": 2, "put": 2, "get": 0, "recreate": 0, "look": 0}
"""How many entries of the ledger each writes when all goes well."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one client of a round has to do."""

    data: str
    ledger: str
    seed: int
    round: int
    client: int
    boxes: int

    @property
    def tag(self) -> str:
        """The label of all sandboxes of the round."""
        return tag(self.seed, self.round)


class Plan(NamedTuple):
    box: str
    verbs: tuple[Verb, ...]
    ending: Ending


def tag(seed: int, round: int) -> str:
    return f"{seed}-{round}"


def plans(share: Share) -> tuple[Plan, ...]:
    """Drawn from the seed alone."""
    random = Random(f"plan {share.tag} {share.client}")
    return tuple(_plan(random, f"k{share.tag}-{share.client}-{i}") for i in range(share.boxes))


def _plan(random: Random, box: str) -> Plan:
    verbs = ("count", *random.choices(VERBS, k=random.randint(2, 5)))
    return Plan(box, verbs, random.choices(("stop", "keep", "idle"), (6, 2, 1))[0])


def entries(share: Share) -> int:
    """How many entries the client writes if nothing fails."""
    own = plans(share)
    return sum(2 + sum(LINES_OF[verb] for verb in plan.verbs) + 2 * (plan.ending == "stop") for plan in own) + 2


class GaveUp(Exception):
    """This sandbox cannot be used any further; the ledger says why."""


class User:
    """Of one sandbox."""

    def __init__(self, client: Client, ledger: Ledger, share: Share, plan: Plan) -> None:
        self._client = client
        self._ledger = ledger
        self._share = share
        self._plan = plan
        self._random = Random(f"use {plan.box}")
        self._done: list[tuple[Entry, float]] = []
        self._sandbox: Sandbox
        self._wrote = False

    async def live(self) -> None:
        """From its create to its end."""
        self._note("creating")
        self._sandbox = await self._ask("create", self._create)
        self._note("created", pid=self._sandbox.info.pid)
        verbs: dict[Verb, Callable[[], Awaitable[None]]] = {
            "count": self._count,
            "again": self._again,
            "stream": self._stream,
            "pipe": self._pipe,
            "put": self._put,
            "get": self._get,
            "recreate": self._recreate,
            "look": self._look,
        }
        for verb in self._plan.verbs:
            await verbs[verb]()
        await self._leave()

    async def _create(self) -> Sandbox:
        labels = {"kill": self._share.tag, "box": self._plan.box}
        return await self._client.create("tiny", limits=SMALL, key=self._plan.box, labels=labels, idle_timeout=KEPT)

    # --- commands

    async def _count(self) -> None:
        entry = self._intent(lines=self._random.randint(1, 1500))
        result = await self._ask("run", lambda: self._sandbox.run(script(entry), id=entry.id))
        self._ran(entry, result.stdout, result.outcome, result.exit_code, result.duration)

    async def _again(self) -> None:
        """The id of a command that ended: the same answer, and it does not run again."""
        unpiped = [done for done in self._done if not done[0].piped]
        if not unpiped:
            return
        entry, duration = self._random.choice(unpiped)
        result = await self._ask("run again", lambda: self._sandbox.run(script(entry), id=entry.id))
        self._compare(entry, result.stdout, result.outcome, result.exit_code)
        if result.duration != duration:
            self._wrong(f"{entry.id} has another result when it is asked for again: it ran twice")

    async def _stream(self) -> None:
        entry = self._intent(lines=self._random.randint(500, 2500), pause=100)

        async def follow() -> tuple[bytes, str, int | None, float]:
            process = await self._sandbox.start(script(entry), id=entry.id)
            seen = bytearray()
            async for chunk in process.stdout:
                seen += chunk
            result = await process.wait()
            return bytes(seen), result.outcome, result.exit_code, result.duration

        self._ran(entry, *await self._ask("stream", follow))

    async def _pipe(self) -> None:
        entry = self._intent(lines=self._random.randint(1, 20_000), piped=True)
        sent = numbered(entry.id, entry.lines)
        result = await self._ask("pipe", lambda: self._sandbox.run(script(entry), id=entry.id, stdin=sent))
        self._ran(entry, result.stdout, result.outcome, result.exit_code, result.duration)

    def _intent(self, *, lines: int, pause: int = 0, piped: bool = False) -> Entry:
        id = f"{self._plan.box}-x{self._random.getrandbits(40):x}"
        exit = self._random.randint(0, 100)
        return self._note("running", id=id, lines=lines, pause=pause, piped=piped, exit=exit)

    def _ran(self, entry: Entry, out: bytes, outcome: str, exit: int | None, duration: float) -> None:
        self._compare(entry, out, outcome, exit)
        self._done.append((entry, duration))
        self._ledger.add(msgspec.structs.replace(entry, what="ran"))

    def _compare(self, entry: Entry, out: bytes, outcome: str, exit: int | None) -> None:
        if (outcome, exit) != ("exited", entry.exit):
            self._wrong(f"{entry.id} ended as {outcome} {exit}, expected exit code {entry.exit}")
        if out != (wanted := numbered(entry.id, entry.lines)):
            self._wrong(
                f"{entry.id} wrote {len(out)} bytes, expected {len(wanted)}; the first {common(out, wanted)} agree"
            )

    # --- files and the rest

    async def _put(self) -> None:
        self._note("writing")
        await self._ask("write", lambda: self._sandbox.files.write(COPY, content(self._plan.box)), again=True)
        self._note("wrote")
        self._wrote = True

    async def _get(self) -> None:
        if self._wrote and await self._ask("read", lambda: self._sandbox.files.read(COPY)) != content(self._plan.box):
            self._wrong("a file reads otherwise than it was written")

    async def _recreate(self) -> None:
        if (again := await self._ask("create again", self._create)).id != self._sandbox.id:
            self._wrong(f"the key of {self._sandbox.id} made {again.id} as well")

    async def _look(self) -> None:
        found = await self._ask("list", lambda: self._client.list({"box": self._plan.box}))
        if [info.id for info in found] not in ([self._sandbox.id], []):
            self._wrong(f"listed are {[info.id for info in found]}, expected {self._sandbox.id}")

    async def _leave(self) -> None:
        if self._plan.ending == "stop":
            self._note("stopping")
            await self._ask("stop", self._sandbox.stop)
            self._note("stopped")
        elif self._plan.ending == "idle":
            self._note("stopping")
            await self._ask("renew", lambda: self._sandbox.renew(idle_timeout=IDLE))

    # --- asking

    async def _ask(self, verb: str, work: Callable[[], Awaitable[T]], again: bool = False) -> T:
        """`again`: the SDK leaves it to its user to repeat this after a loss. `GaveUp` once the failure is noted."""
        for left in reversed(range(TRIES if again else 3)):
            try:
                async with asyncio.timeout(PATIENCE):
                    return await work()
            except BarchanError as error:
                if not left or not (error.retry or error.phase == "link"):
                    self._note("failed", verb=verb, code=error.code, text=str(error))
                    raise GaveUp from error
                self._note("failed", verb=verb, code="retried", text=f"{error.code}: {error}")
                await asyncio.sleep(0.2)
            except TimeoutError as error:
                self._wrong(f"{verb}: no answer in {PATIENCE:g} s")
                raise GaveUp from error
            except Exception as error:
                self._wrong(f"{verb}: an untyped failure\n{traceback.format_exc()}")
                raise GaveUp from error
        raise AssertionError("unreachable")

    def _note(self, what: What, **fields: Any) -> Entry:
        sandbox = getattr(self, "_sandbox", None)
        known = {"box": self._plan.box, "sandbox": sandbox.id if sandbox else "", "client": self._share.client}
        entry = Entry(what=what, **{**known, **fields})
        self._ledger.add(entry)
        return entry

    def _wrong(self, text: str) -> None:
        self._note("wrong", text=text)


def common(one: bytes, two: bytes) -> int:
    """Length of their common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


async def reach(client: Client) -> None:
    """A client that never reached its API does not wait for it by itself."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await client.nodes()
                return
            except ApiUnavailable:
                await asyncio.sleep(0.1)


async def work(share: Share) -> None:
    ledger, room = Ledger(Path(share.ledger)), asyncio.Semaphore(AT_ONCE)
    ledger.add(Entry(what="client", client=share.client, pid=os.getpid()))

    async def one(client: Client, plan: Plan) -> None:
        async with room:
            try:
                await User(client, ledger, share, plan).live()
            except GaveUp:
                return

    async with Client(data=share.data) as client:
        await reach(client)
        await asyncio.gather(*(one(client, plan) for plan in plans(share)))
    ledger.add(Entry(what="finished", client=share.client))


if __name__ == "__main__":
    asyncio.run(work(msgspec.json.decode(sys.argv[1], type=Share)))
