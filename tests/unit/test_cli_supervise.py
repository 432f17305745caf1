"""The supervisor with real child processes that follow a script."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from barchan.cli.datadir import UpRecord, prepare, read_record
from barchan.cli.processes import ProcessRef, end, is_alive, reference
from barchan.cli.services import Service
from barchan.cli.supervise import BACKOFF_FIRST, BACKOFF_MOST, STEADY_SECONDS, Supervisor, end_leftovers, next_delay
from barchan.config import ApiConfig, Layout, NodeConfig
from barchan.errors import AdmissionRefused, ApiUnavailable, BarchanError, NodeUnavailable

SERVES = "print('ready', flush=True); signal.pause()"
SLOW = "time.sleep(600)"


class Stage:
    """A data directory, scripted services, and what the supervisor reported."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layout = Layout(root / "data")
        prepare(self.layout)
        self.record = UpRecord(api=ApiConfig(layout=self.layout), node=NodeConfig(layout=self.layout, name="n"))
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self._news = asyncio.Event()

    def service(self, name: str, script: str) -> Service:
        """A module that reads its settings and then does what `script` says."""
        head = "import json, os, signal, sys, time\nconfig = json.load(sys.stdin)\n"
        (self.root / f"scripted_{name}.py").write_text(head + textwrap.dedent(script))
        config = self.record.api if name == "api" else self.record.node
        return Service(name, f"scripted_{name}", config)

    def supervisor(self, api: str = SERVES, node: str = SERVES) -> Supervisor:
        return Supervisor(self.record, self.report, (self.service("api", api), self.service("node", node)))

    def report(self, event: str, details: dict[str, Any]) -> None:
        self.seen.append((event, details))
        self._news.set()

    async def until(self, count: int, event: str) -> dict[str, Any]:
        """Details of the `count`th report of `event`."""
        async with asyncio.timeout(20):
            while len(found := [d for e, d in self.seen if e == event]) < count:
                self._news.clear()
                await self._news.wait()
        return found[count - 1]

    async def serving(self, supervisor: Supervisor, act: Callable[[], Awaitable[None]]) -> None:
        """Run the supervisor; when it serves, `act`, then SIGTERM."""
        announced = asyncio.Event()
        running = asyncio.create_task(supervisor.run(announced.set))
        waiting = asyncio.create_task(announced.wait())
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not running.done():
            try:
                await act()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
        await running


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return Stage(tmp_path)


async def test_starts_both_in_order_and_ends_them(stage: Stage) -> None:
    processes: list[ProcessRef] = []

    async def act() -> None:
        record = read_record(stage.layout)
        assert record is not None and record.supervisor == reference(os.getpid())
        assert list(record.services) == ["api", "node"]
        processes.extend(record.services.values())
        assert all(map(is_alive, processes))
        stage.layout.api_socket.touch()

    await stage.serving(stage.supervisor(), act)
    assert [(e, d.get("service")) for e, d in stage.seen] == [
        ("started", "api"),
        ("started", "node"),
        ("stopped", None),
    ]
    assert stage.seen[-1][1] == {"sandboxes": "left running"}
    assert len(processes) == 2 and not any(map(is_alive, processes))
    assert not stage.layout.api_socket.exists()
    assert (record := read_record(stage.layout)) is not None and record.services == {}


async def test_settings_arrive_as_one_document(stage: Stage) -> None:
    told = stage.root / "told"
    script = f"open({str(told)!r}, 'w').write(json.dumps(config)); " + SERVES

    async def act() -> None:
        assert '"name": "n"' in told.read_text() and f'"data": "{stage.layout.data}"' in told.read_text()

    await stage.serving(stage.supervisor(node=script), act)


async def test_what_the_api_says_about_itself(stage: Stage) -> None:
    said = "print(json.dumps({'ready': 'api', 'url': 'http://[::1]:4'}), flush=True); signal.pause()"
    supervisor = stage.supervisor(api=said)

    async def act() -> None:
        assert supervisor.url == "http://[::1]:4"

    await stage.serving(supervisor, act)


async def test_a_killed_service_is_started_again(stage: Stage) -> None:
    async def act() -> None:
        started = await stage.until(2, "started")
        os.kill(started["pid"], signal.SIGKILL)
        ended = await stage.until(1, "ended")
        assert ended == {"service": "node", "how": "killed by SIGKILL", "restart_in": BACKOFF_FIRST}
        again = await stage.until(3, "started")
        assert again["service"] == "node" and again["pid"] != started["pid"]
        record = read_record(stage.layout)
        assert record is not None and record.services["node"].pid == again["pid"]

    await stage.serving(stage.supervisor(), act)


async def test_a_service_that_keeps_failing_is_tried_with_growing_delays(stage: Stage) -> None:
    flag = stage.root / "flag"
    script = f"""
        if os.path.exists({str(flag)!r}):
            sys.exit(3)
        open({str(flag)!r}, "w").close()
        print("ready", flush=True)
        sys.exit(4)
    """

    async def act() -> None:
        await stage.until(3, "ended")

    await stage.serving(stage.supervisor(node=script), act)
    ends = [d for e, d in stage.seen if e == "ended"]
    assert [d["how"] for d in ends] == ["exit code 4", "exit code 3", "exit code 3"]
    assert [d["restart_in"] for d in ends] == [0.1, 0.2, 0.4]
    failed = [d for e, d in stage.seen if e == "failed"]
    assert "node did not start: exit code 3" in failed[0]["error"]


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        ("sys.exit(3)", ApiUnavailable, "exit code 3"),
        ("os.kill(os.getpid(), 9)", ApiUnavailable, "killed by SIGKILL"),
        ("print('x' * 100000, flush=True); time.sleep(600)", ApiUnavailable, "api did not start"),
        ("print(json.dumps({'code': 'admission_refused', 'message': 'no room'}))", AdmissionRefused, "no room"),
    ],
)
async def test_the_first_failure_ends_it_all(stage: Stage, script: str, error: type[BarchanError], text: str) -> None:
    with pytest.raises(error, match=text):
        await stage.supervisor(api=script).run(lambda: pytest.fail("announced"))
    assert (record := read_record(stage.layout)) is not None and record.services == {}


async def test_a_node_that_does_not_start_ends_the_api_too(stage: Stage) -> None:
    with pytest.raises(NodeUnavailable):
        await stage.supervisor(node="sys.exit(1)").run(lambda: pytest.fail("announced"))
    pid = (await stage.until(1, "started"))["pid"]
    assert not is_alive(reference(pid))


async def test_a_signal_during_the_start_ends_it(stage: Stage) -> None:
    running = asyncio.create_task(stage.supervisor(node=SLOW).run(lambda: pytest.fail("announced")))
    await stage.until(1, "started")
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(20):
        await running
    assert stage.seen[-1][0] == "stopped"


async def test_a_second_signal_does_not_wait(stage: Stage) -> None:
    refused = stage.root / "refused"
    os.mkfifo(refused)
    stubborn = f"""
        signal.signal(signal.SIGTERM, lambda *_: open({str(refused)!r}, "w").close())
        print("ready", flush=True)
        while True:
            signal.pause()
    """
    announced = asyncio.Event()
    running = asyncio.create_task(stage.supervisor(node=stubborn).run(announced.set))
    async with asyncio.timeout(20):
        await announced.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.to_thread(refused.read_bytes)
        began = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    assert asyncio.get_running_loop().time() - began < 5


async def test_what_a_killed_supervisor_left_is_ended(stage: Stage) -> None:
    service = stage.service("node", SERVES)
    process = await service.launch()
    await service.ready()
    other = reference(os.getpid())
    reused = ProcessRef(other.pid, other.started + 1)
    record = UpRecord(api=stage.record.api, node=stage.record.node, services={"node": process, "api": reused})
    assert end_leftovers(record) == ("node",), "a reused pid is not ours to end"
    assert await service.ended() == -signal.SIGTERM
    assert end_leftovers(record) == () == end_leftovers(None)


def test_delays() -> None:
    delays = [0.0]
    for _ in range(10):
        delays.append(next_delay(delays[-1], 0.0))
    assert delays[1:4] == [BACKOFF_FIRST, 2 * BACKOFF_FIRST, 4 * BACKOFF_FIRST]
    assert delays[-1] == BACKOFF_MOST == next_delay(BACKOFF_MOST, STEADY_SECONDS - 1)
    assert next_delay(BACKOFF_MOST, STEADY_SECONDS) == BACKOFF_FIRST


def test_a_process_that_never_was() -> None:
    assert end(ProcessRef(2**22 + 1, 5), signal.SIGKILL, 0)
    assert not is_alive(ProcessRef(os.getpid(), 1))
