"""Shell sessions of one sandbox: commands that others run in, told by id, and how each ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from barchan.errors import ExecNotFound, InvalidRequest, ShellEnded
from barchan.node.execution import Execution
from barchan.node.outcome import shell_ended
from barchan.node.recorder import Recorder

END_SECONDS = 1.0
"""How long after the guest called a session ended its own end is waited for, to tell how."""


class Shells:
    def __init__(self, sandbox: str, recorder: Recorder, executions: Mapping[str, Execution]) -> None:
        self._sandbox = sandbox
        self._recorder = recorder
        self._executions = executions
        self._known: set[str] = set()

    def __contains__(self, id: str) -> bool:
        return id in self._known

    def opened(self, id: str) -> None:
        self._known.add(id)

    def operation(self, id: str) -> int:
        """The guest's id of it. Raises `ExecNotFound`."""
        state = self._recorder.exec_state(self._sandbox, id)
        if state is None:
            raise ExecNotFound(f"no shell session {id}", field="shell")
        return state.seq

    async def check(self, id: str) -> None:
        """Raises `ExecNotFound`, `InvalidRequest` for a command that is no session, `ShellEnded`."""
        self.operation(id)
        if id not in self._known:
            if not (await self._recorder.request(self._sandbox, id)).opens_shell:
                raise InvalidRequest(f"command {id} is no shell session", field="shell")
            self.opened(id)
        result = await self._recorder.result(self._sandbox, id)
        if result is not None:
            raise shell_ended(result)

    async def ended(self, command: str) -> ShellEnded:
        """Of a command line that the guest refused because its session is over: the error that says how that ended."""
        shell = (await self._recorder.request(self._sandbox, command)).shell or ""
        session = self._executions.get(shell)
        if session is not None:
            await asyncio.wait([session.result], timeout=END_SECONDS)
        return shell_ended(await self._recorder.result(self._sandbox, shell))
