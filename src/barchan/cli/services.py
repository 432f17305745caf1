"""The two server processes: how one is started, told its settings, known to serve, and ended.

A service is `python -m MODULE`. It reads its settings as one JSON document from stdin until end-of-file, writes one line
to stdout, logs to stderr, and ends on SIGTERM. The line is `ready` or a JSON object with a key `ready` when it serves, and
an `ErrorBody` as JSON when it cannot.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import msgspec

from barchan.cli.processes import ProcessRef, reference, send
from barchan.config import ApiConfig, NodeConfig, encode_config
from barchan.errors import ApiUnavailable, BarchanError, ErrorBody, NodeUnavailable, from_body

READY_SECONDS = 120.0
"""A node may have many sandboxes to take up, or a scratch volume to make."""
STOP_SECONDS = 10.0
_LINE_MOST = 1 << 16
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 20)}
"""glibc gives memory of 128 KiB and more back at once; output passes in pieces of that size, and each would fault anew."""
WHY_HINT = "its messages say why"


class Service:
    """One server process, started again and again. Not for concurrent use."""

    def __init__(self, name: str, module: str, config: ApiConfig | NodeConfig) -> None:
        self.name = name
        self._module = module
        self._config = encode_config(config)
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None

    @property
    def reference(self) -> ProcessRef | None:
        """Of the running process."""
        if self._process is None or self._process.returncode is not None:
            return None
        return reference(self._process.pid)

    async def launch(self) -> ProcessRef:
        """Start the process; it may not serve yet."""
        self._process = await spawn(self._module, self._config)
        return reference(self._process.pid)

    async def ready(self) -> dict[str, Any]:
        """Wait until it serves, and return what it says about itself. Otherwise ends it and raises what it said."""
        assert self._process is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(READY_SECONDS):
                line = await self._process.stdout.readline()
        except (TimeoutError, ValueError):
            line = b""
        if (details := _readiness(line)) is not None:
            self._drain = asyncio.create_task(_discard(self._process.stdout))
            return details
        await self.stop(1.0)
        raise _refusal(self.name, line, self._process.returncode)

    async def ended(self) -> int:
        """Wait for its end. Returns as `subprocess` does: negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace: float = STOP_SECONDS) -> None:
        """SIGTERM, after `grace` seconds SIGKILL. Safe at any time, also twice."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        send(reference(process.pid), signal.SIGTERM)
        try:
            async with asyncio.timeout(grace):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            send(reference(self._process.pid), signal.SIGKILL)


def _readiness(line: bytes) -> dict[str, Any] | None:
    if line.strip() == b"ready":
        return {}
    try:
        said = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return said if isinstance(said, dict) and "ready" in said else None


async def spawn(module: str, config: bytes, *arguments: str) -> asyncio.subprocess.Process:
    """Start a module of ours in a session of its own, so that the terminal's ctrl-C does not reach it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**_ALLOCATOR, **os.environ},
        start_new_session=True,
        limit=_LINE_MOST,
    )
    assert process.stdin is not None
    with suppress(ConnectionError):
        process.stdin.write(config)
        await process.stdin.drain()
    process.stdin.close()
    return process


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(_LINE_MOST):
        pass


def _refusal(name: str, line: bytes, code: int | None) -> BarchanError:
    with suppress(msgspec.DecodeError):
        return from_body(msgspec.json.decode(line, type=ErrorBody))
    kind = ApiUnavailable if name == "api" else NodeUnavailable
    return kind(f"{name} did not start: {how_ended(code)}", phase="start", hint=WHY_HINT)


def how_ended(code: int | None) -> str:
    if code is None:
        return "still running"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


async def purge(config: NodeConfig, timeout: float) -> None:
    """Stop all sandboxes of a node that has no agent, and remove its mounts, loop devices and cgroups."""
    process = await spawn("barchan.node.main", encode_config(config), "--purge")
    assert process.stdout is not None
    drain = asyncio.create_task(_discard(process.stdout))
    try:
        async with asyncio.timeout(timeout):
            code = await process.wait()
    except TimeoutError as error:
        send(reference(process.pid), signal.SIGKILL)
        await process.wait()
        raise NodeUnavailable(f"clean-up took more than {timeout:g} s", phase="purge", hint="try again") from error
    finally:
        await drain
    if code:
        raise NodeUnavailable(f"clean-up failed: {how_ended(code)}", phase="purge", hint=WHY_HINT)
