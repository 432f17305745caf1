"""Commands of the scripted guest: what the programs named in `fake` do."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

from barchan.wire.frames import STDERR, STDOUT
from barchan.wire.guest import GuestOutcome, OpKind


class Stream:
    """Output kept until it is acknowledged."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.acknowledged = 0
        self.sent = 0
        self.limit = 0
        self.ended = False
        self.eof_sent = False


class Command:
    """One command of a fake guest. `pump` sends what it has to send."""

    kind = OpKind.EXEC

    def __init__(
        self, pump: Callable[[Command], None], id: int, argv: tuple[bytes, ...], size: tuple[int, int] = (0, 0)
    ) -> None:
        self.id = id
        self.size = size
        self.resized: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.streams = {STDOUT: Stream(), STDERR: Stream()}
        self.input: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.taken = 0
        self.done: tuple[GuestOutcome, int, bytes] | None = None
        self._pump = pump
        self.task = asyncio.get_running_loop().create_task(self._run([word.decode() for word in argv]))
        self.task.add_done_callback(self._ended)

    def resize(self, size: tuple[int, int]) -> None:
        self.size = size
        self.resized.put_nowait(size)

    async def _run(self, argv: list[str]) -> None:
        program = getattr(self, f"_do_{argv[0]}", None)
        if program is None:
            self.end(GuestOutcome.FAILED, errno.ENOENT, b"exec")
        else:
            self.end(GuestOutcome.EXITED, await program(argv[1:]))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Also of one that was cancelled before its first step."""
        if task.cancelled() and self.done is None:
            self.end(GuestOutcome.CANCELLED, 0)

    async def _do_true(self, words: list[str]) -> int:
        return 0

    async def _do_false(self, words: list[str]) -> int:
        return 1

    async def _do_exit(self, words: list[str]) -> int:
        return int(words[0])

    async def _do_echo(self, words: list[str]) -> int:
        self.write((" ".join(words) + "\n").encode())
        return 0

    async def _do_cat(self, words: list[str]) -> int:
        while (data := await self.input.get()) is not None:
            self.write(data)
        return 0

    async def _do_sleep(self, words: list[str]) -> int:
        await asyncio.sleep(float(words[0]))
        return 0

    async def _do_flood(self, words: list[str]) -> int:
        self.write(b"x" * int(words[0]))
        return 0

    async def _do_stty(self, words: list[str]) -> int:
        self.write(b"%d %d\n" % self.size)
        return 0

    async def _do_winch(self, words: list[str]) -> int:
        for _ in range(int(words[0])):
            self.write(b"%d %d\n" % await self.resized.get())
        return 0

    def write(self, data: bytes) -> None:
        self.streams[STDOUT].data += data
        self._pump(self)

    def end(self, outcome: GuestOutcome, code: int, detail: bytes = b"") -> None:
        self.done = (outcome, code, detail)
        for stream in self.streams.values():
            stream.ended = True
        self._pump(self)


class Session(Command):
    """A shell session: it only keeps what its command lines leave behind."""

    def __init__(self, pump: Callable[[Command], None], id: int) -> None:
        self.cwd = "/"
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.line: Line | None = None
        super().__init__(pump, id, ())

    async def _run(self, argv: list[str]) -> None:
        self.end(GuestOutcome.EXITED, await self.code)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self.line is not None:
            self.line.task.cancel()
        super()._ended(task)


class Line(Command):
    """A command line in a session."""

    kind = OpKind.RUN

    def __init__(self, pump: Callable[[Command], None], id: int, session: Command | None, command: bytes) -> None:
        self._session = session
        super().__init__(pump, id, tuple(command.split()))

    async def _run(self, argv: list[str]) -> None:
        session = self._session
        if not isinstance(session, Session) or session.done is not None:
            self.end(GuestOutcome.FAILED, errno.ESRCH, b"shell")
        elif session.line is not None:
            self.end(GuestOutcome.FAILED, errno.EBUSY, b"shell")
        else:
            session.line = self
            await super()._run(argv)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if isinstance(self._session, Session) and self._session.line is self:
            self._session.line = None
        super()._ended(task)

    async def _do_exit(self, words: list[str]) -> int:
        assert isinstance(self._session, Session)
        self._session.code.set_result(int(words[0]))
        return int(words[0])

    async def _do_cd(self, words: list[str]) -> int:
        assert isinstance(self._session, Session)
        self._session.cwd = words[0]
        return 0

    async def _do_pwd(self, words: list[str]) -> int:
        assert isinstance(self._session, Session)
        self.write(self._session.cwd.encode() + b"\n")
        return 0
