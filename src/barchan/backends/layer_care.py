"""What a node does for its layer store by and by: removes what nobody needs, reads everything, lets go of what is damaged."""

from __future__ import annotations

import asyncio
import logging
import threading

from barchan.backends.pulls import Pulls
from barchan.config import NodeConfig
from barchan.layers import holds
from barchan.layers.build_cache import expire
from barchan.layers.gc import collect
from barchan.layers.mount import LayerMounts
from barchan.layers.scrubber import scrub
from barchan.layers.store import LayerStore

logger = logging.getLogger(__name__)


class LayerCare:
    """`tidy` runs in a thread; `stop`, from the event loop, makes it end soon."""

    def __init__(self, config: NodeConfig, store: LayerStore, mounts: LayerMounts, pulls: Pulls) -> None:
        self._config, self._store, self._mounts, self._pulls = config, store, mounts, pulls
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def tidy(self, loop: asyncio.AbstractEventLoop, held: frozenset[str]) -> None:
        """Also unmounts what is gone: sandboxes that were made of it have clones of their own. `held`: of live sandboxes."""
        self._store.sweep()
        expire(self._store)
        if self._store.shared:
            holds.renew(self._store, self._config.layout.instance.read_text(), held)
        collect(self._store, held=held | holds.of_all(self._store))
        # In this order: a layer that comes and is mounted in between is in neither.
        self._mounts.close(self._mounts.mounted() - self._store.digests())
        if self._config.scrub_seconds:
            self._scrub(loop)
        # Also by the word of another node.
        self._mounts.close({digest for digest in self._mounts.mounted() if not self._store.intact(digest)})

    def _scrub(self, loop: asyncio.AbstractEventLoop) -> None:
        def mend(image: str) -> None:
            asyncio.run_coroutine_threadsafe(self._pulls.pull(image), loop).result()

        config = self._config
        found = scrub(
            self._store,
            rate=config.scrub_rate,
            most=config.scrub_bytes,
            older=config.scrub_seconds,
            mend=mend,
            stop=self._stopped,
        )
        for one in found.damaged if found else ():
            logger.warning("%s (%s); %s", one.why, ", ".join(one.names), one.remedy or "fetched again")
            self._mounts.close(self._mounts.mounted() & {one.digest})
