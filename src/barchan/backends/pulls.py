"""Images that this node fetches because a sandbox is to be made of them: each once, however many wait for it."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import msgspec

from barchan.config import RegistryAccess, encode_config
from barchan.errors import CreateFailed, from_body
from barchan.layers.pull_worker import PullNews, PullRequest

logger = logging.getLogger(__name__)
_LONGEST_LINE = 1 << 20


class Pulls:
    """All methods belong to the event loop's thread."""

    def __init__(self, store: Path, access: RegistryAccess, at_once: int) -> None:
        self._store, self._access = store, access
        self._room = asyncio.Semaphore(at_once)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def pull(self, ref: str) -> None:
        """Until it is in the store. Raises what `layers.pull` does. Others who wait do not suffer when one gives up."""
        task = self._running.get(ref)
        if task is None:
            task = self._running[ref] = asyncio.get_running_loop().create_task(self._pull(ref))
            task.add_done_callback(lambda done: self._ended(ref, done))
        await asyncio.shield(task)

    def _ended(self, ref: str, task: asyncio.Task[None]) -> None:
        del self._running[ref]
        if not task.cancelled():
            task.exception()  # it was told to whoever waits; perhaps nobody does any more

    async def _pull(self, ref: str) -> None:
        async with self._room:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "barchan.layers.pull_worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
            )
            assert process.stdin is not None and process.stdout is not None, "they are pipes"
            try:
                request = PullRequest(store=self._store, ref=ref, access=self._access)
                process.stdin.write(encode_config(request) + b"\n")
                await self._follow(ref, process.stdout)
            finally:
                process.stdin.close()
                if process.returncode is None:
                    process.kill()
                await process.wait()

    async def _follow(self, ref: str, output: asyncio.StreamReader) -> None:
        async for line in output:
            news = msgspec.json.decode(line, type=PullNews)
            if news.error is not None:
                raise from_body(news.error)
            if news.done:
                return
            logger.info("%s: %s", ref, news.progress)
        raise CreateFailed(f"the process that fetched {ref} was killed", hint="try again", phase="pull")

    async def close(self) -> None:
        """Images that are under way are given up."""
        for task in (running := list(self._running.values())):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
