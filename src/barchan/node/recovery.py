"""What a starting agent does about its predecessor: adopt what runs, finish what was ending, sweep what nobody knows."""

from __future__ import annotations

import asyncio
import logging
import time

from barchan.backends.base import Backend, Running
from barchan.errors import BarchanError, SandboxUnavailable
from barchan.kernel import processes
from barchan.node.agent import Agent
from barchan.node.machine import advance
from barchan.node.registry import SandboxRow
from barchan.node.sandbox import LiveSandbox

logger = logging.getLogger(__name__)


async def recover(agent: Agent) -> None:
    """Every live row is adopted or brought to its end; then every trace of unknown sandboxes is removed."""
    await asyncio.gather(*(_recover_one(agent, row) for row in agent.registry.live()))
    for backend in agent.backends.values():
        await _sweep(agent, backend)


async def _recover_one(agent: Agent, row: SandboxRow) -> None:
    step = advance(row.state, "agent_restarted")
    end = agent.recorder.end_of(row.id)
    if end is not None:
        step, reason = advance(row.state, "lost" if end.failed else "stop"), end.reason
    elif step.action == "adopt":
        reason = await _adopt(agent, row)
        if not reason:
            return
        step = advance(row.state, "lost")
    else:
        reason = row.reason or "the node agent ended while it was being created"
    logger.warning("sandbox %s: %s", row.id, reason)
    backend = agent.backends[row.spec.backend]
    await agent.registry.update(row.id, state=step.state, reason=reason)
    error = SandboxUnavailable(f"sandbox {row.id}: {reason}")
    await LiveSandbox(row.id, row.spec, {}, backend, agent.recorder, agent.broken).give_up_all(error)
    try:
        await backend.destroy(_name(row))
    except (BarchanError, OSError) as failure:
        # The others must not wait for it: `lease.watch` tries again.
        logger.error("cannot remove %s: %s", row.id, failure)
        return
    await agent.recorder.stop(row.id, reason, failed=step.state == "failing")
    await agent.registry.update(row.id, state=advance(step.state, "cleaned").state, reason=reason)
    agent.recorder.forget(row.id)


def _name(row: SandboxRow) -> str:
    """For the backend: one that was not asked to adopt it knows only its place."""
    return row.id if row.state == "ready" or not row.cgroup else row.cgroup


async def _adopt(agent: Agent, row: SandboxRow) -> str:
    """Take up a running sandbox. Returns why that cannot be, or an empty text."""
    backend = agent.backends.get(row.spec.backend)
    if backend is None:
        return f"this node has no {row.spec.backend} backend any more"
    if row.boot != processes.boot_id():
        return "the host was restarted"
    running = Running(
        pid=row.pid,
        pid_start=row.pid_start,
        place=row.cgroup,
        handles=row.handles,
        open_network=row.spec.network.mode == "open",
    )
    if not await backend.adopt(row.id, running):
        return "its first process ended while the node agent was away"
    sandbox = LiveSandbox(row.id, row.spec, await agent.registry.secrets(row.id), backend, agent.recorder, agent.broken)
    try:
        await sandbox.connect()
    except BarchanError as error:
        sandbox.close(error)
        return str(error)
    agent.sandboxes[row.id] = sandbox
    agent.registry.touch(row.id, time.time())  # uses of the last seconds may not have reached the disk
    backend.watch(row.id, lambda reason: agent.broken(row.id, reason))
    return ""


async def _sweep(agent: Agent, backend: Backend) -> None:
    known = {row.id for row in agent.registry.live()}
    for id in sorted(await backend.leftovers() - known):
        logger.warning("removing what is left of %s", id)
        try:
            await backend.destroy(id)
        except (BarchanError, OSError) as error:
            logger.error("cannot remove %s: %s", id, error)
