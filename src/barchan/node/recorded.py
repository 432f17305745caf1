"""What is recorded of sandboxes, for the event loop to ask: commands from memory, everything else from the log."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import cast

from barchan.errors import ExecNotFound
from barchan.node.info import beginning
from barchan.node.past import Past
from barchan.packing import PackedLayer
from barchan.spec import Exec, ExecId, ExecInfo, ExecResult
from barchan.trajectory import walk
from barchan.trajectory.index import Change, ExecState, Rebuilt
from barchan.trajectory.log import Log
from barchan.trajectory.record import ExecBegun, ExecEnded, PackEnded, Position, Record

_PIECES, _RECORDS = 8, 32
"""Read per hop to a thread."""
ARGV_SHOWN = 1024


class Recorded:
    """Commands are seen once their records are written, their ends only once they are durable."""

    def __init__(self, log: Log, execs: Mapping[str, Mapping[str, ExecState]]) -> None:
        self._log = log
        self._past = Past(log)
        self._view = {name: dict(states) for name, states in execs.items()}

    def exec_state(self, sandbox: str, exec_id: str) -> ExecState | None:
        return self._view.get(sandbox, {}).get(exec_id)

    def names(self, sandbox: str) -> dict[int, str]:
        """Ids of its commands by the seq of their begin."""
        return {state.seq: state.id for state in self._view.get(sandbox, {}).values()}

    def running(self, sandbox: str) -> list[ExecState]:
        """Begun and not ended, in order of seq."""
        return [state for state in self._view.get(sandbox, {}).values() if not state.ended]

    async def commands(self, sandbox: str, ended: bool, since: float) -> Rebuilt:
        """All that is known of a sandbox's commands; of one that has `ended`, and was made at `since`, from the log."""
        states = self._view.get(sandbox)
        if states is None and ended:
            return await self._past.of(sandbox, since)
        return Rebuilt(states or {}, True, frozenset())

    async def infos(self, states: Mapping[str, ExecState], after: str = "", limit: int = 1 << 30) -> list[ExecInfo]:
        """In the order in which they began, from the one that follows `after`. Raises `ExecNotFound`."""
        if after and after not in states:
            raise ExecNotFound(f"no command {after}", field="after")
        first = states[after].seq if after else 0
        page = list(itertools.islice((state for state in states.values() if state.seq > first), limit))
        return await asyncio.to_thread(lambda: [self._info(state) for state in page])

    async def execs(self, sandbox: str, after: str = "", limit: int = 1 << 30) -> list[ExecInfo]:
        """As `infos`, of a sandbox that has not ended."""
        return await self.infos(self._view.get(sandbox, {}), after, limit)

    async def request(self, sandbox: str, exec_id: str) -> Exec:
        """As recorded: secrets are digests."""
        return await asyncio.to_thread(self._read_request, self._seen(sandbox, exec_id))

    async def result(self, sandbox: str, exec_id: str) -> ExecResult | None:
        """None while it runs."""
        state = self._seen(sandbox, exec_id)
        return await asyncio.to_thread(self._read_result, state.newest) if state.ended else None

    def read_output(self, sandbox: str, exec_id: str, stream: int, offset: int = 0) -> AsyncIterator[bytes]:
        """What is recorded now, from `offset` on. To go on live, subscribe at `exec_state(…)`'s total first."""
        return self.pieces(self._seen(sandbox, exec_id), stream, offset)

    async def result_of(self, state: ExecState) -> ExecResult:
        """Of one that has ended."""
        return await asyncio.to_thread(self._read_result, state.newest)

    async def pieces(self, state: ExecState, stream: int, offset: int) -> AsyncIterator[bytes]:
        places = await asyncio.to_thread(walk.output_places, self._log, state.newest, stream, offset)
        for at in range(0, len(places), _PIECES):
            some = places[at : at + _PIECES]
            for piece in await asyncio.to_thread(walk.output_pieces, self._log, some, offset):
                yield piece

    async def history(self, sandbox: str) -> AsyncIterator[Record]:
        """Every record of a sandbox that is still kept, also of a forgotten one, in order. Reads whole segments."""
        mine = (record for _, record in self._log.scan_of(sandbox))
        while some := await asyncio.to_thread(lambda: list(itertools.islice(mine, _RECORDS))):
            for record in some:
                yield record

    def _publish(self, news: tuple[list[Change], list[str]]) -> None:
        """Take in changed commands and drop forgotten sandboxes."""
        changes, forgotten = news
        for sandbox, state in changes:
            self._view.setdefault(sandbox, {})[state.id] = state
        for sandbox in forgotten:
            self._view.pop(sandbox, None)

    def _seen(self, sandbox: str, exec_id: str) -> ExecState:
        state = self.exec_state(sandbox, exec_id)
        if state is None:
            raise ExecNotFound(f"sandbox {sandbox} has no command {exec_id}")
        return state

    def _info(self, state: ExecState) -> ExecInfo:
        request = self._read_request(state)
        argv = beginning(request.argv, ARGV_SHOWN)
        result = self._read_result(state.newest) if state.ended else None
        return ExecInfo(
            id=ExecId(state.id),
            argv=argv,
            shell=request.shell,
            started=state.started,
            result=result,
            stdout_recorded=state.stdout,
            stderr_recorded=state.stderr,
        )

    def _read_request(self, state: ExecState) -> Exec:
        return cast(ExecBegun, self._log.read(state.first).body).request

    def _read_packed(self, position: Position) -> PackedLayer | None:
        return cast(PackEnded, self._log.read(position).body).packed

    def _read_result(self, position: Position) -> ExecResult:
        return cast(ExecEnded, self._log.read(position).body).result
