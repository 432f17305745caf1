"""Now and then give back what nothing needs any more."""

from __future__ import annotations

import asyncio
import logging

from barchan.errors import BarchanError
from barchan.node.agent import Agent

logger = logging.getLogger(__name__)
SOON = 5.0


async def watch(agent: Agent) -> None:
    """Every `tidy_seconds`, for ever; the first time soon: of an agent that was killed with work under way, processes end a moment later."""
    pause = min(SOON, agent.config.tidy_seconds)
    while True:
        await asyncio.sleep(pause)
        pause = agent.config.tidy_seconds
        for backend in agent.backends.values():
            try:
                await backend.tidy()
            except (BarchanError, OSError) as error:
                logger.warning(
                    "%s: not everything that is unused could be given back: %s", backend.abilities.backend, error
                )
