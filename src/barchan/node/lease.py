"""Lifetimes: which sandboxes have to end now. The decision is pure; `watch` acts on it."""

from __future__ import annotations

import asyncio
import time

from barchan.node.agent import Agent
from barchan.node.registry import SandboxRow


def overdue(row: SandboxRow, now: float, busy: bool) -> str:
    """Why `row` has to end at `now`, or an empty text. While a caller is attached it is not idle."""
    if row.state != "ready":
        return ""
    if now >= row.expires:
        return "its lifetime ended"
    if not busy and now >= row.last_used + row.spec.idle_timeout:
        return "it was idle for too long"
    return ""


async def watch(agent: Agent) -> None:
    """Check every `sweep_seconds`, for ever."""
    while True:
        await asyncio.sleep(agent.config.sweep_seconds)
        now = time.time()
        for row in agent.registry.live():
            if row.state in ("stopping", "failing"):
                agent.spawn(agent.stop(row.id, row.reason))  # joins a removal under way, tries again one that failed
            sandbox = agent.sandboxes.get(row.id)
            if sandbox is None:
                continue
            if sandbox.busy:
                agent.registry.touch(row.id, now)
            if reason := overdue(row, now, sandbox.busy):
                agent.spawn(agent.stop(row.id, reason, "expired"))
            else:
                agent.spawn(sandbox.check())
