"""One sandbox, as its user sees it."""

from __future__ import annotations

import contextlib
import os
from typing import Self

from barchan.errors import BarchanError
from barchan.images import ImageConfig
from barchan.packing import PackedLayer, PackOrder, ScrubRules, check_order
from barchan.sdk import _compat
from barchan.sdk._connection import Connection
from barchan.sdk._exec import Input, run_exec
from barchan.sdk._files import Files
from barchan.sdk._process import Process, begin
from barchan.sdk._results import CompletedExec
from barchan.sdk._shell import Shell
from barchan.sdk._terminal import OUTPUT_LIMIT as TERMINAL_LIMIT
from barchan.sdk._terminal import TerminalProcess
from barchan.sdk._values import Command, Text, Variables, to_argv, to_bytes, to_env, value_of
from barchan.spec import MIB, Exec, ExecInfo, ProcessInfo, SandboxId, SandboxInfo, Terminal
from barchan.usage import SandboxStats
from barchan.wire.ids import new_exec_id, new_id
from barchan.wire.messages import (
    GetSandbox,
    GetStats,
    ListExecs,
    ListProcesses,
    PackDiff,
    RenewSandbox,
    Request,
    StopSandbox,
    unpack,
)

OUTPUT_LIMIT = 64 * MIB


@_compat.exclusive
class Sandbox:
    """A sandbox. As a context manager it is stopped at the end of the block.

    Any method may raise `SandboxNotFound`, `SandboxStopped`, `SandboxUnavailable` (its first process is dead or does not
    answer), `NodeUnavailable`, `ApiUnavailable`, `Unauthenticated`.
    """

    def __init__(self, connection: Connection, info: SandboxInfo, timeout: float | None) -> None:
        self.info = info
        """As of the last answer about it; `refresh()` asks again."""
        self.files = Files(connection, info.id, timeout)
        self._connection = connection
        self._timeout = timeout

    @property
    def id(self) -> SandboxId:
        return self.info.id

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.info.state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # What ended the block is what its author must see; the sandbox's lifetime ends it if this cannot.
        with contextlib.suppress(BarchanError) if kind is not None else contextlib.nullcontext():
            await self.stop()

    async def run(
        self,
        command: Command,
        *,
        cwd: Text | os.PathLike[str] | None = None,
        env: Variables | None = None,
        secrets: Variables | None = None,
        user: str | None = None,
        timeout: float | None = None,
        grace: float = 1.0,
        stdin: Input | None = None,
        output_limit: int = OUTPUT_LIMIT,
        merge_stderr: bool = False,
        keep_background: bool = False,
        id: str | None = None,
        check: bool = False,
    ) -> CompletedExec:
        """Run a command to its end. A `str` is run by the sandbox's /bin/sh, a sequence is the arguments as they are.

        `timeout` seconds after its start the command is ended with all its processes, SIGTERM first and SIGKILL `grace` seconds
        later; the result says `timed_out` and has the output so far. Of each output at most `output_limit` bytes are kept,
        in memory. It returns when the main process has ended and its output is read; background processes go on, and with
        `keep_background` their output is waited for. `secrets` are like `env`, but never stored. Without `stdin` the command
        reads end of file.

        Cancelling this call (also by `asyncio.timeout`) cancels the command in the sandbox. After a lost connection the
        command is taken up again without a gap; it never runs twice. With your own `id`, sending the same command again, even
        from another process, answers with the first run's result.

        A non-zero exit is a result; `check=True` raises `CommandFailed` instead. Raises `InvalidRequest`, `UserNotFound`,
        `Conflict` (the id was used for another command), `SandboxLogFull` and `NodeStorageFull` (too much is on record).
        """
        request = value_of(
            Exec,
            argv=to_argv(command),
            cwd=None if cwd is None else to_bytes(cwd, "cwd"),
            env=to_env(env),
            secrets=to_env(secrets, "secrets"),
            user=user,
            timeout=timeout,
            grace=grace,
            stdin=stdin is not None,
            output_limit=output_limit,
            merge_stderr=merge_stderr,
            keep_background=keep_background,
        )
        result = await run_exec(self._connection, self.id, id or new_exec_id(), request, stdin)
        return result.check() if check else result

    async def start(
        self,
        command: Command,
        *,
        cwd: Text | os.PathLike[str] | None = None,
        env: Variables | None = None,
        secrets: Variables | None = None,
        user: str | None = None,
        timeout: float | None = None,
        grace: float = 1.0,
        stdin: bool = False,
        output_limit: int = OUTPUT_LIMIT,
        merge_stderr: bool = False,
        keep_background: bool = False,
        id: str | None = None,
    ) -> Process:
        """Start a command and return a handle as soon as it runs. Arguments and errors as with `run`.

        `stdin=True` opens its standard input for `process.stdin`. The command does not end with the handle.
        """
        request = value_of(
            Exec,
            argv=to_argv(command),
            cwd=None if cwd is None else to_bytes(cwd, "cwd"),
            env=to_env(env),
            secrets=to_env(secrets, "secrets"),
            user=user,
            timeout=timeout,
            grace=grace,
            stdin=stdin,
            output_limit=output_limit,
            merge_stderr=merge_stderr,
            keep_background=keep_background,
        )
        return await begin(self._connection, self.id, id or new_exec_id(), request)

    def shell(
        self,
        program: Text | None = None,
        *,
        cwd: Text | os.PathLike[str] | None = None,
        env: Variables | None = None,
        secrets: Variables | None = None,
        user: str | None = None,
        id: str | None = None,
    ) -> Shell:
        """A shell session, opened by `async with`: commands in it share directory, variables and functions.

        `program` is a path of a shell in the sandbox; without one it is bash where there is one, else sh. Any number of sessions can be
        open at once. With your own `id`, asking again, even from another process, takes up the same session.
        """
        request = value_of(
            Exec,
            argv=() if program is None else (to_bytes(program, "program"),),
            cwd=None if cwd is None else to_bytes(cwd, "cwd"),
            env=to_env(env),
            secrets=to_env(secrets, "secrets"),
            user=user,
            opens_shell=True,
        )
        return Shell(self._connection, self.id, id or new_exec_id(), request)

    async def tty(
        self,
        command: Command,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: Text | os.PathLike[str] | None = None,
        env: Variables | None = None,
        secrets: Variables | None = None,
        user: str | None = None,
        timeout: float | None = None,
        grace: float = 1.0,
        output_limit: int = TERMINAL_LIMIT,
        id: str | None = None,
    ) -> TerminalProcess:
        """Start a command on a terminal of its own and return a handle as soon as it runs. Other arguments and errors as with `run`.

        Its input is the terminal; all its output is what the terminal shows. TERM is `xterm-256color` unless `env` or the sandbox's
        own says otherwise.
        """
        request = value_of(
            Exec,
            argv=to_argv(command),
            cwd=None if cwd is None else to_bytes(cwd, "cwd"),
            env=to_env(env),
            secrets=to_env(secrets, "secrets"),
            user=user,
            timeout=timeout,
            grace=grace,
            stdin=True,
            output_limit=output_limit,
            tty=Terminal(rows=rows, columns=columns),
        )
        process = await begin(self._connection, self.id, id or new_exec_id(), request)
        return TerminalProcess(self._connection, self.id, process)

    async def attach(self, id: str, *, stdout_offset: int = 0, stderr_offset: int = 0) -> Process:
        """A handle on a command that runs or ran, from any client. Output starts at the offsets (bytes).

        Of a sandbox that has ended, for as long as it is listed: outputs come from the log. Raises `ExecNotFound`, and
        `RecordGone` for what the log does not hold any more, then or when it is read.
        """
        return await begin(
            self._connection, self.id, id, None, stdout_offset=stdout_offset, stderr_offset=stderr_offset
        )

    async def execs(self, *, partial: bool = False) -> tuple[ExecInfo, ...]:
        """Every command of this sandbox, oldest first, also when it has ended.

        Raises `RecordGone` when the log does not hold all of its record any more; with `partial`, those that it holds.
        """
        found: list[ExecInfo] = []
        while True:
            request = ListExecs(sandbox=self.id, after=found[-1].id if found else "", partial=partial)
            page = unpack(await self._ask(request, retry=True), tuple[ExecInfo, ...])
            found += page
            if len(page) < request.limit:
                return tuple(found)

    async def processes(self) -> tuple[ProcessInfo, ...]:
        """What runs inside, ids as seen inside."""
        return unpack(await self._ask(ListProcesses(sandbox=self.id), retry=True), tuple[ProcessInfo, ...])

    async def stats(self) -> SandboxStats:
        """What it uses now and has used. Does not count as use. Raises `NotSupported` where its backend does not measure."""
        return unpack(await self._ask(GetStats(sandbox=self.id), retry=True), SandboxStats)

    async def pack_diff(
        self,
        name: str,
        *,
        whole: bool = False,
        scrub: ScrubRules | None = None,
        config: ImageConfig | None = None,
        key: str | None = None,
        timeout: float = 600.0,
    ) -> PackedLayer:
        """Make what this sandbox has changed the next version of `name`, while it runs: its programs wait for milliseconds.

        The name then stands for the changes alone, to be a `workspace` or one of the `toolkits` of other sandboxes. With `whole` it stands for
        all layers of this sandbox with the changes on top: `client.create(name)` restores it, files but no processes, with the
        user, variables and directory of its environment, or with those of `config`. What `scrub` leaves out of it, and what by default
        (histories, logs, caches, credentials): docs/reference/scrub-policy.md.

        `key` makes it idempotent: the same key and values answer with the same layer, other values with `Conflict`. A lost connection is retried
        with the same key. Cancelling this call leaves nothing behind.

        Raises `InvalidRequest` (`field` names what is wrong; `whole` when the image would have more than 100 layers), `NodeStorageFull`,
        `EnvironmentNotFound` (what the sandbox was made of was removed meanwhile), `NotSupported`, `CreateFailed`, `SandboxLogFull`, and `RequestTimeout` after
        `timeout` seconds.
        """
        order = value_of(PackOrder, name=name, whole=whole, scrub=scrub or ScrubRules(), config=config)
        request = PackDiff(sandbox=self.id, order=check_order(order), key=key or new_id())
        return unpack(await self._connection.request(request, retry=True, timeout=timeout), PackedLayer)

    async def stop(self) -> SandboxInfo:
        """End it with everything inside. Idempotent."""
        return await self._update(StopSandbox(sandbox=self.id), retry=True)

    async def renew(self, *, idle_timeout: float | None = None, lifetime: float | None = None) -> SandboxInfo:
        """Count as use; with a value (seconds), also change that limit. `lifetime` counts from creation."""
        request = RenewSandbox(sandbox=self.id, idle_timeout=idle_timeout, lifetime=lifetime)
        return await self._update(request, retry=True)

    async def refresh(self) -> SandboxInfo:
        """Ask again for `info`."""
        return await self._update(GetSandbox(sandbox=self.id), retry=True)

    async def _update(self, request: Request, *, retry: bool) -> SandboxInfo:
        self.info = unpack(await self._ask(request, retry=retry), SandboxInfo)
        return self.info

    async def _ask(self, request: Request, *, retry: bool) -> bytes:
        return await self._connection.request(request, retry=retry, timeout=self._timeout)
