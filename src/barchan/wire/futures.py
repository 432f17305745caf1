"""What links and streams wait with. The synchronous client has a module of its own in this place: `sdk/_sync/_futures.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Future = asyncio.Future
Task = asyncio.Task


def new_future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def start(work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> asyncio.Task[T]:
    return asyncio.get_running_loop().create_task(work(*args))
