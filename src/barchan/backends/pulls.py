"""Images that this node fetches because a sandbox is to be made of them, or because somebody says so: each once, however many wait."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from barchan.config import RegistryAccess, encode_config
from barchan.environments import PullProgress, Told, untold
from barchan.errors import CreateFailed, from_body
from barchan.layers.content import Format
from barchan.layers.pull_worker import PullNews, PullRequest
from barchan.wire.messages import EnvironmentInfo

_LONGEST_LINE = 1 << 20


class _Pull:
    """One image on its way."""

    def __init__(self, ref: str) -> None:
        self.progress = PullProgress(image=ref, phase="waiting")
        self.listeners: set[Told] = set()
        self.task: asyncio.Task[EnvironmentInfo] | None = None

    def tell(self, progress: PullProgress) -> None:
        self.progress = progress
        for told in tuple(self.listeners):
            told(progress)


class Pulls:
    """All methods belong to the event loop's thread."""

    def __init__(self, store: Path, access: RegistryAccess, at_once: int, format: Format) -> None:
        self._store, self._access, self._format = store, access, format
        self._room = asyncio.Semaphore(at_once)
        self._running: dict[tuple[str, bool], _Pull] = {}

    async def pull(self, ref: str, told: Told = untold, *, again: bool = False) -> EnvironmentInfo:
        """Until it is in the store. Raises what `layers.pull` does.

        Others who wait do not suffer when one gives up; when the last one does, the image comes all the same: whoever
        asks again, after a time-out that was too short, finds it there or nearly so.
        """
        if (pull := self._running.get((ref, again))) is None:
            pull = self._running[ref, again] = _Pull(ref)
            pull.task = asyncio.get_running_loop().create_task(self._pull(pull, ref, again))
            pull.task.add_done_callback(lambda done: self._ended((ref, again), done))
        assert pull.task is not None
        hearing = lambda progress: told(progress)
        pull.listeners.add(hearing)
        try:
            told(pull.progress)
            return await asyncio.shield(pull.task)
        finally:
            pull.listeners.discard(hearing)

    def _ended(self, key: tuple[str, bool], task: asyncio.Task[EnvironmentInfo]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # it was told to whoever waits; perhaps nobody does any more

    async def _pull(self, pull: _Pull, ref: str, again: bool) -> EnvironmentInfo:
        async with self._room:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "barchan.layers.pull_worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
            )
            assert process.stdin is not None and process.stdout is not None, "they are pipes"
            try:
                request = PullRequest(store=self._store, ref=ref, access=self._access, again=again, format=self._format)
                process.stdin.write(encode_config(request) + b"\n")
                return await self._follow(pull, process.stdout)
            finally:
                process.stdin.close()
                if process.returncode is None:
                    process.kill()
                await process.wait()

    async def _follow(self, pull: _Pull, output: asyncio.StreamReader) -> EnvironmentInfo:
        async for line in output:
            news = msgspec.json.decode(line, type=PullNews)
            if news.error is not None:
                raise from_body(news.error)
            if news.done is not None:
                return news.done
            if news.progress is not None:
                pull.tell(news.progress)
        said = f"the process that fetched {pull.progress.image} was killed"
        raise CreateFailed(said, hint="try again", phase="pull")

    async def close(self) -> None:
        """Images that are under way are given up."""
        running = [pull.task for pull in self._running.values() if pull.task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
