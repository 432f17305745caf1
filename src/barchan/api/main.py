"""The API process: open as root, give root up, serve until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable

import msgspec
import uvloop

from barchan.api.listen import Opened
from barchan.api.server import Ready, serving
from barchan.config import ApiConfig

logger = logging.getLogger(__name__)


def print_ready(ready: Ready) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()


def run(config: ApiConfig, on_ready: Callable[[Ready], None] = print_ready) -> None:
    """Serve until SIGTERM or SIGINT. Raises `InvalidRequest` or `Conflict` when the sockets cannot be opened."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with Opened(config) as opened:
        drop_root(config.uid)
        uvloop.run(_serve(config, opened, on_ready))


def drop_root(uid: int) -> None:
    """Become an ordinary user for good. Without root there is nothing to give up."""
    if os.geteuid() != 0 or uid == 0:
        return
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


async def _serve(config: ApiConfig, opened: Opened, on_ready: Callable[[Ready], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(config, opened) as ready:
        on_ready(ready)
        await stop.wait()
    logger.info("stopped")
