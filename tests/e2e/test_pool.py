"""What is made ahead of requests: used, counted, and never left behind when something of the server is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from barchan import Client, Limits
from barchan.backends.container_make import SHM_SHARE
from barchan.kernel import processes
from barchan.spec import MIB
from tests.e2e.conftest import make_tiny
from tests.server import Server, own_server

AGAIN = 4


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with own_server("pool", "--scratch-bytes", "512m") as server:
        server.run("env", "import", "tiny", str(make_tiny(tmp_path_factory.mktemp("tiny"))))
        yield server


@pytest.fixture
async def client(own: Server) -> AsyncIterator[Client]:
    async with Client(data=own.data) as client:
        yield client


async def demand(server: Server, client: Client, *, alike: bool) -> dict[str, set[int]]:
    """Create and stop some, of one shape or of many; returns what the node has made ahead of more of the kind."""
    for _ in range(AGAIN):
        await (await client.create("tiny", hostname="same" if alike else f"h{secrets.token_hex(4)}")).stop()
    async with asyncio.timeout(20):
        while not (held := {name: pids for name, pids in ahead(server).items() if pids and waits(pids) != alike}):
            await asyncio.sleep(0.02)
    return held


def waits(pids: set[int]) -> bool:
    """A parked child still runs the spawner's program."""
    try:
        return any(Path(f"/proc/{pid}/comm").read_text().strip() == "spawner" for pid in pids)
    except (FileNotFoundError, ProcessLookupError):
        return False


def parents(server: Server) -> list[Path]:
    """Of the server's groups, in every hierarchy."""
    name = "barchan-" + (server.data / "instance").read_text().strip()
    root = Path("/sys/fs/cgroup")
    return [path for path in (root / name, *(place / name for place in root.iterdir())) if path.is_dir()]


def ahead(server: Server) -> dict[str, set[int]]:
    """Places that are made ahead, and the processes in each."""
    names = {group.name for parent in parents(server) for group in parent.glob("pool-*")}
    return {name: processes_in(server, name) for name in names}


def processes_in(server: Server, name: str) -> set[int]:
    found: set[int] = set()
    for parent in parents(server):
        with contextlib.suppress(OSError):  # it may go while it is read
            found |= {int(pid) for procs in (parent / name).rglob("cgroup.procs") for pid in procs.read_text().split()}
    return found


def traces(server: Server, name: str) -> list[Path]:
    places = [server.data / "scratch" / name]
    places += [parent / name for parent in parents(server)]
    holder = f"{(server.data / 'instance').read_text().strip()}/{name}"
    ranges = [path for path in Path("/run/barchan/ids").iterdir() if path.is_symlink() and holds(path, holder)]
    return [*(path for path in places if os.path.lexists(path)), *ranges]


def holds(range_: Path, holder: str) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it may go while it is read
        return os.readlink(range_) == holder
    return False


def kill(server: Server, service: str) -> None:
    pid = json.loads((server.data / "run" / "up.json").read_text())["services"][service]["pid"]
    os.kill(pid, signal.SIGKILL)


async def gone(server: Server, places: dict[str, set[int]]) -> None:
    async with asyncio.timeout(20):
        while any(traces(server, name) or any(map(processes.start_time, pids)) for name, pids in places.items()):
            await asyncio.sleep(0.05)


async def test_a_ready_one_is_handed_out_with_what_is_its_own(own: Server, client: Client) -> None:
    held = await demand(own, client, alike=True)
    async with await client.create("tiny", hostname="same", labels={"a": "b"}, env={"E": "mine"}) as sandbox:
        assert sandbox.info.pid in set().union(*held.values()), "it ran before it was asked for"
        assert sandbox.info.labels == {"a": "b"}
        assert (await sandbox.run("hostname; echo $E")).text == "same\nmine\n"
    async with await client.create("tiny", hostname="other") as sandbox:
        assert (await sandbox.run("hostname; echo $E")).text == "other\n\n", "another shape is another sandbox"


async def test_a_parked_one_gets_the_limits_of_its_request(own: Server, client: Client) -> None:
    held = await demand(own, client, alike=False)
    async with await client.create("tiny", hostname="fresh", limits=Limits(memory=48 * MIB, pids=20)) as sandbox:
        assert sandbox.info.pid in set().union(*held.values()), "it waited before it was asked for"
        assert (await sandbox.run("hostname")).text == "fresh\n"
        crowd = await sandbox.run("for i in $(seq 40); do sleep 5 & done; wait")
        assert crowd.limit == "pids"
        full = await sandbox.run("head -c 100000000 /dev/zero > /dev/shm/x")
        assert full.exit_code and int((await sandbox.run("stat -c %s /dev/shm/x")).text) <= 48 * MIB // SHM_SHARE


async def test_a_pooled_sandbox_outlives_the_agent_and_the_rest_of_the_pool_does_not(
    own: Server, client: Client
) -> None:
    await demand(own, client, alike=True)
    sandbox = await client.create("tiny", hostname="same")
    pid = sandbox.info.pid
    await sandbox.run("echo kept > /kept")
    held = ahead(own)
    (place,) = [name for name, pids in held.items() if pid in pids]
    rest = {name: pids for name, pids in held.items() if name != place}
    assert rest
    kill(own, "node")
    assert (await sandbox.run("cat /kept")).text == "kept\n"
    await gone(own, rest)
    assert processes.start_time(pid) and traces(own, place)
    await sandbox.stop()
    await gone(own, {place: {pid}})


async def test_parked_children_end_with_the_spawner_and_leave_nothing(own: Server, client: Client) -> None:
    parked = await demand(own, client, alike=False)
    node = json.loads((own.data / "run" / "up.json").read_text())["services"]["node"]["pid"]
    (spawner,) = [
        int(child)
        for task in Path(f"/proc/{node}/task").iterdir()
        for child in (task / "children").read_text().split()
        if waits({int(child)})
    ]
    os.kill(spawner, signal.SIGKILL)
    await gone(own, parked)
    async with await client.create("tiny", hostname="after") as sandbox:
        assert (await sandbox.run("hostname")).text == "after\n"
