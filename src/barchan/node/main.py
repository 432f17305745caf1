"""The node agent's process: `python -m barchan.node.main [--purge]`, its `NodeConfig` as JSON on standard input.

Prints `ready` once the API has taken the node, or the error as JSON when it cannot serve. SIGTERM and SIGINT end the agent and leave the sandboxes running;
`--purge` ends all sandboxes of the data directory and removes everything that was mounted or made for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import uvloop

from barchan.backends.container import ContainerBackend
from barchan.config import NodeConfig, decode_config
from barchan.errors import BarchanError, Conflict, FeatureMissing, InvalidRequest, WrongVersion
from barchan.kernel import processes
from barchan.kernel.probe import examine
from barchan.kernel.scratch import default_size
from barchan.names import check_name
from barchan.net.access import check_access
from barchan.node import housekeeping, lease, lockwatch
from barchan.node.agent import Agent
from barchan.node.recorder import Recorder
from barchan.node.recovery import recover
from barchan.node.registry import Registry
from barchan.node.rows import check_version
from barchan.node.server import keep_linked

logger = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005
"""How long a worker thread may hold the interpreter while the event loop wants it. Python's default is ten times as much."""


def read_config(data: bytes) -> NodeConfig:
    """Raises `InvalidRequest` naming what is wrong."""
    try:
        config = decode_config(data, NodeConfig)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"node configuration: {error}") from error
    check_name(config.name, "name")
    check_access(config.network, config.max_sandboxes + config.pool_most)
    return config


@contextlib.contextmanager
def only_one(config: NodeConfig) -> Iterator[None]:
    """One agent per data directory. Raises `Conflict`."""
    path = config.layout.run / "node.lock"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(f"another node agent uses {config.layout.data}") from error
        yield


def open_backend(config: NodeConfig) -> ContainerBackend:
    """Probe the host and prepare what containers need. Blocking."""
    report = examine(config.layout)
    if config.kernel == "reduced":
        report = msgspec.structs.replace(report, kernel="reduced", quota="ordinary")
    report.require()
    size = config.scratch_bytes or default_size(config.layout, config.scratch_share, config.scratch_most)
    return ContainerBackend.open(config, report, config.layout.instance.read_text().strip(), size)


@contextlib.asynccontextmanager
async def running_agent(config: NodeConfig) -> AsyncIterator[tuple[Agent, ContainerBackend]]:
    """An agent that has recovered what its predecessor left."""
    backend = await asyncio.to_thread(open_backend, config)
    await backend.network.open()
    async with await Registry.open(config.layout) as registry:
        live = registry.live()
        since = min((row.created for row in live), default=time.time())
        ids = [row.id for row in live]
        async with await Recorder.open(config.layout, config, live=ids, since=since) as recorder:
            agent = Agent(config, registry, recorder, {"container": backend})
            await recover(agent)
            yield agent, backend
            await agent.close()


async def serve(config: NodeConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_agent(config) as (agent, backend):
        tasks = [
            asyncio.ensure_future(keep_linked(agent, config.layout.node_socket, Ready())),
            asyncio.ensure_future(lease.watch(agent)),
            asyncio.ensure_future(housekeeping.watch(agent)),
            asyncio.ensure_future(lockwatch.watch(agent)),
            asyncio.ensure_future(backend.network.watch()),
        ]
        waiting = asyncio.ensure_future(stop.wait())
        done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (waiting, *tasks):
            task.cancel()
        for task in done - {waiting}:
            task.result()
        await backend.close()


class Ready:
    """Says `ready` once, to the supervisor that reads standard output."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self) -> None:
        if not self._said:
            self._said = True
            print("ready", flush=True)


async def purge(config: NodeConfig) -> None:
    try:
        check_version(config.layout.registry)
    except WrongVersion as error:
        logger.warning("%s", error.message)
        return await purge_unread(config)
    async with running_agent(config) as (agent, backend):
        await asyncio.gather(*(agent.stop(row.id, "the node was taken down") for row in agent.registry.live()))
        await backend.purge()


async def purge_unread(config: NodeConfig) -> None:
    """What another version made: its sandboxes are found without the registry."""
    backend = await asyncio.to_thread(open_backend, config)
    for id in sorted(await backend.leftovers()):
        await backend.destroy(id)
    await backend.purge()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s node %(levelname)s %(message)s", stream=sys.stderr)
    try:
        if os.geteuid() != 0:
            raise FeatureMissing("the node agent needs root", hint="run `barchan up` as root")
        os.umask(0o077)  # nothing made from here on is anybody else's to read, whatever started us
        config = read_config(sys.stdin.buffer.read())
        _raise_file_limits()
        sys.setswitchinterval(SWITCH_SECONDS)
        with only_one(config):
            uvloop.run(purge(config) if "--purge" in sys.argv[1:] else serve(config))
    except BarchanError as error:
        logger.error("%s", error)
        print(msgspec.json.encode(error.body()).decode(), flush=True)
        return 1
    return 0


def _raise_file_limits() -> None:
    """A sandbox costs the agent a few descriptors, and the host as many as it likes to open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if (left := processes.unbind_files()) < processes.FILES_UNBOUNDED:
        logger.warning(
            "fs.file-max is %d and cannot be raised: sandboxes together can use up the host's open files", left
        )


if __name__ == "__main__":
    sys.exit(main())
