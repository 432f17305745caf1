# Generated from tests/e2e/test_cases_ends.py by `python -m tests.repo.unasync`: edit that file, not this one.
"""kill -9 of a client, of the services, of everything at once: limits of life hold, and nothing is left of what is over."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan import errors
from barchan.sync import Client, Limits
from bench import leaks
from tests.e2e.conftest import make_tiny
from tests.server import PLACE, Server, remove, shared_server

MIB = 1 << 20
SMALL = Limits(memory=16 * MIB, pids=16, disk=4 * MIB)
COUNT, IDLE, LATE = 50, 3.0, 5.0
"""`LATE`: seconds after its due time by which a sandbox must be gone."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of this module's own, since it is going to be killed. `leaks` looks for its name."""
    shared_server()
    server = Server(Path(os.environ[PLACE] + "-sync-ends"))
    try:
        up(server)
        server.run("env", "import", "tiny", str(make_tiny(tmp_path_factory.mktemp("tiny"))))
        yield server
    finally:
        remove(server.data)


def up(server: Server) -> None:
    server.run("up", "-d", "--name", "kill", "--scratch-bytes", "512m")


def recorded(server: Server) -> dict[str, int]:
    """Pids of the supervisor and the services."""
    state = json.loads((server.data / "run/up.json").read_text())
    return {"supervisor": state["supervisor"]["pid"], **{k: v["pid"] for k, v in state["services"].items()}}


def kill(*pids: int) -> None:
    """kill -9 of all, none of which can react to the end of another, and wait until all are gone."""
    handles = [os.pidfd_open(pid) for pid in pids]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for handle in handles:
            signal.pidfd_send_signal(handle, number)
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(10_000)
        os.close(handle)


def spawner_of(agent: int) -> int:
    children = [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
    return next(pid for pid in children if b"spawner" in Path(f"/proc/{pid}/cmdline").read_bytes())


def left(client: Client, server: Server, seconds: float) -> list[str]:
    """What is there of sandboxes that have ended, once there is nothing or the time is over."""
    instance, until = (server.data / "instance").read_text().strip(), time.monotonic() + seconds
    while True:
        client.nodes()
        found = leaks.of_sandboxes(server.data, instance, recorded(server)["node"])
        if not found or time.monotonic() > until:
            return found


USE = """
import signal, sys
from barchan.sync import Client, Limits

with Client(data=sys.argv[1]) as client:
    count, idle = int(sys.argv[2]) // 2, float(sys.argv[3])
    for why, life in (("idle", {"idle_timeout": idle}), ("lifetime", {"lifetime": 2 * idle})):
        limits = Limits(memory=16 << 20, pids=16, disk=4 << 20)
        for sandbox in client.create_many(count, "tiny", limits=limits, labels={"why": why}, **life).all():
            sandbox.files.write("/some", b"x" * 100_000)
            sandbox.start("trap '' TERM; sleep 600; sleep 601")
    print("ready", flush=True)
    signal.pause()
"""


@contextmanager
def user(server: Server) -> Iterator[int]:
    """The pid of a process that made its sandboxes and started something in each."""
    argv = [sys.executable, "-c", USE, str(server.data), str(COUNT), str(IDLE)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid


@pytest.mark.parametrize("also", [(), ("api", "node")], ids=["client", "client, API and node agent"])
def test_what_a_killed_client_leaves_is_reaped_in_time(own: Server, also: tuple[str, ...]) -> None:
    """CASES 5: fifty that live, with commands running; each is gone by its limit of life, and so is all it had."""
    with Client(data=own.data) as client:
        with user(own) as pid:
            made = [info for info in client.list() if "why" in info.labels and info.state == "ready"]
            assert len(made) == COUNT
            kill(pid, *(recorded(own)[name] for name in also))
        due = max(info.created + (IDLE if info.labels["why"] == "idle" else 2 * IDLE) for info in made)
        while lives := [info.id for info in client.list() if "why" in info.labels]:
            assert time.time() < due + IDLE + LATE, lives
        ended = [client.get(info.id).info for info in made]
        assert {info.state for info in ended} == {"stopped"}
        assert all(info.labels["why"] in info.reason for info in ended)
        assert left(client, own, 20) == []


def test_everything_killed_at_once_leaves_nothing_that_seems_to_live(own: Server) -> None:
    """CASES 5: supervisor, API, agent, spawner and sandboxes die together; the next server says so and cleans up."""
    with Client(data=own.data) as client:
        dead = [client.create("tiny", limits=SMALL) for _ in range(5)]
        spared = client.create("tiny", limits=SMALL)
        done = spared.run("echo kept > /kept; echo said", id="once")
        assert done.stdout == b"said\n"
        pids = recorded(own)
        kill(*pids.values(), spawner_of(pids["node"]), *(box.info.pid for box in dead))
    up(own)
    with Client(data=own.data) as client:
        for box in dead:
            with pytest.raises(errors.SandboxUnavailable):
                client.get(box.id).run("true")
            assert client.get(box.id).info.state in ("failing", "failed")
        again = client.get(spared.id)
        assert again.info.pid == spared.info.pid and again.info.state == "ready", "it was adopted"
        assert again.run("echo kept > /kept; echo said", id="once").stdout == b"said\n", "an acknowledged result"
        assert again.run("cat /kept").stdout == b"kept\n"
        with client.create("tiny", limits=SMALL) as fresh:
            assert fresh.run("echo new").stdout == b"new\n"
        again.stop()
        assert left(client, own, 20) == []


def test_a_lifetime_that_ends_while_no_server_runs(own: Server) -> None:
    """CASES 5: the next server ends it at once, with the reason."""
    with Client(data=own.data) as client:
        box = client.create("tiny", limits=SMALL, lifetime=2)
        box.start("sleep 600")
        pids = recorded(own)
        kill(*pids.values())
    handle = os.pidfd_open(box.info.pid)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert not poll.poll(2000), "nobody is there who could end it"
    up(own)
    assert poll.poll(LATE * 1000)
    os.close(handle)
    with Client(data=own.data) as client:
        info = client.get(box.id).info
        assert info.state in ("stopping", "stopped") and "lifetime" in info.reason
        assert left(client, own, 20) == []


def test_the_server_itself_leaves_nothing(own: Server) -> None:
    """CASES 5: after all that, taken down."""
    instance = (own.data / "instance").read_text().strip()
    own.run("down", timeout=120)
    assert leaks.of_server(own.data, instance) == []
