"""The registry keeps what it acknowledged, answers a repeated key, and forgets secrets with the sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from barchan.config import Layout
from barchan.errors import Conflict, InternalError, NodeStorageFull, SandboxNotFound, WrongVersion
from barchan.node import registry as registry_module
from barchan.node import rows
from barchan.node.registry import Claim, Registry
from barchan.spec import EnvironmentRef, SandboxSpec
from tests.disks import small_disk

SPEC = SandboxSpec(environment=EnvironmentRef(base="debian"), labels={"a": "b"}, secrets={"TOKEN": "hunter2"})
ROOT = Path(__file__).parents[2]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def claim(registry: Registry, id: str, key: str = "", spec: SandboxSpec = SPEC) -> Claim:
    return await registry.claim(id, spec, create_key=key, created=1.0, expires=2.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def registry(tmp_path: Path, clock: Clock) -> AsyncIterator[Registry]:
    async with await Registry.open(Layout(tmp_path), clock=clock) as registry:
        yield registry


async def test_a_row_from_claim_to_end(registry: Registry, tmp_path: Path, clock: Clock) -> None:
    row, fresh, synced = await claim(registry, "n-1", "key")
    await synced
    assert fresh and row.state == "creating" and registry.get("n-1") == row == registry.by_key("key")
    row = await registry.update(
        "n-1",
        when=("creating",),
        state="ready",
        pid=7,
        pid_start=8,
        cgroup="/c",
        boot="b",
        ready_ms=1.5,
        handles=b"\0h",
    )
    assert registry.live() == [row] and (row.pid, row.handles) == (7, b"\0h")
    clock.now = 5000.0
    row = await registry.update("n-1", state="stopped", reason="done")
    assert row.ended == 5000.0 and registry.live() == [] and registry.rows() == [row]
    await registry.close()
    async with await Registry.open(Layout(tmp_path), clock=clock) as again:
        assert again.rows() == [row] and again.by_key("key") == row
        assert not (await claim(again, "n-2", "key")).fresh


async def test_one_key_is_one_sandbox(registry: Registry) -> None:
    claims = await asyncio.gather(*(claim(registry, f"n-{number}", "key") for number in range(20)))
    assert [one.fresh for one in claims] == [True] + [False] * 19
    assert {one.row.id for one in claims} == {"n-0"}
    for other in (
        msgspec.structs.replace(SPEC, user="x"),
        msgspec.structs.replace(SPEC, secrets={"TOKEN": "other"}),
    ):
        with pytest.raises(Conflict):
            await claim(registry, "n-99", "key", other)
    assert registry.get("n-99") is None and registry.by_key("") is None


async def test_without_a_key_every_claim_is_a_sandbox_and_an_id_is_used_once(registry: Registry) -> None:
    assert all(one.fresh for one in await asyncio.gather(*(claim(registry, f"n-{i}") for i in range(5))))
    done = await asyncio.gather(claim(registry, "n-1"), claim(registry, "n-5"), return_exceptions=True)
    assert isinstance(done[0], Conflict) and len(registry.live()) == 6


async def test_changes_depend_on_the_state(registry: Registry) -> None:
    await claim(registry, "n-1")
    done = await asyncio.gather(
        registry.update("n-1", when=("creating", "ready"), state="stopping"),
        registry.update("n-1", when=("creating",), state="ready"),
        return_exceptions=True,
    )
    assert isinstance(done[1], Conflict)
    row = registry.get("n-1")
    assert row is not None and row.state == "stopping"
    with pytest.raises(SandboxNotFound):
        await registry.update("n-2", state="ready")


async def test_what_is_not_hurried_goes_with_the_next_change(registry: Registry) -> None:
    await claim(registry, "n-1")
    marked = registry.update("n-1", durable=False, hurried=False, state="stopping", reason="asked")
    ended = registry.update("n-1", state="stopped")
    row = await ended
    assert (row.state, row.reason) == ("stopped", "asked")
    assert marked.done() and marked.result().state == "stopping"


async def test_what_is_not_hurried_is_written_also_alone(registry: Registry, tmp_path: Path) -> None:
    await claim(registry, "n-1")
    async with asyncio.timeout(5):
        await registry.update("n-1", hurried=False, state="stopping")
    left = registry.update("n-1", hurried=False, reason="at the end")
    await registry.close()
    assert left.done()
    async with await Registry.open(Layout(tmp_path)) as again:
        (row,) = again.rows()
        assert (row.state, row.reason) == ("stopping", "at the end")


async def test_removed_is_as_if_it_never_was(registry: Registry) -> None:
    await claim(registry, "n-1", "key")
    await registry.remove("n-1")
    await registry.remove("n-1")
    assert registry.rows() == [] and await registry.secrets("n-1") == {}
    assert (await claim(registry, "n-1", "key")).fresh


async def test_secrets_are_readable_until_the_end(registry: Registry, tmp_path: Path) -> None:
    await claim(registry, "n-1")
    row = registry.get("n-1")
    assert row is not None and row.spec.secrets["TOKEN"].startswith("hmac-sha256:")
    assert await registry.secrets("n-1") == {"TOKEN": "hunter2"}
    await registry.update("n-1", spec=msgspec.structs.replace(row.spec, lifetime=5.0, secrets={"TOKEN": "raw"}))
    changed = registry.get("n-1")
    assert changed is not None and changed.spec == msgspec.structs.replace(row.spec, lifetime=5.0)
    await registry.update("n-1", state="failed", reason="x")
    assert await registry.secrets("n-1") == {}
    await registry.close()
    for path in tmp_path.glob("node.db*"):
        assert b"hunter2" not in path.read_bytes() and path.stat().st_mode & 0o777 == 0o600


async def test_uses_are_seen_at_once_and_kept(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await claim(registry, "n-1")
    registry.touch("n-1", 50.0)
    registry.touch("n-1", 40.0)
    registry.touch("unknown", 40.0)
    assert [row.last_used for row in registry.live()] == [50.0]
    await registry.update("n-1", last_used=30.0)
    row = registry.get("n-1")
    assert row is not None and row.last_used == 50.0
    await registry.close()
    async with await Registry.open(Layout(tmp_path)) as again:
        assert [row.last_used for row in again.live()] == [50.0]


async def test_uses_are_flushed_in_time(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "TOUCH_SECONDS", 0.01)
    flushed = asyncio.Event()
    submit = registry._submit

    def watched(run: Callable[[], Any], *, durable: bool = True) -> asyncio.Future[Any]:
        flushed.set()
        return submit(run, durable=durable)

    monkeypatch.setattr(registry, "_submit", watched)
    await claim(registry, "n-1")
    flushed.clear()
    registry.touch("n-1", 50.0)
    await asyncio.wait_for(flushed.wait(), 10)
    await registry.secrets("n-1")
    (stored,) = apsw.Connection(str(tmp_path / "node.db")).execute("SELECT last_used FROM sandboxes")
    assert stored == (50.0,)


async def test_ended_ones_are_remembered_within_bounds(
    registry: Registry, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "HISTORY", 3)
    for number in range(6):
        await claim(registry, f"n-{number}", f"k{number}")
        clock.now += 1
        await registry.update(f"n-{number}", state="stopped")
    await claim(registry, "n-live")
    assert [row.id for row in registry.rows()] == ["n-3", "n-4", "n-5", "n-live"]
    assert registry.by_key("k0") is None and registry.by_key("k5") is not None
    clock.now += registry_module.HISTORY_SECONDS + 1
    await registry.update("n-live", pid=1)
    assert [row.id for row in registry.rows()] == ["n-live"]


def test_other_tables_have_another_number() -> None:
    """When this fails, `_TABLES` was changed: raise SCHEMA, then write the new pair here."""
    recorded = (2, "70205b90407fa32b5c4d43178405fad0080222ce348d61d8bd91f9dee8fedd70")
    assert (rows.SCHEMA, hashlib.sha256(rows._TABLES.encode()).hexdigest()) == recorded


@pytest.mark.parametrize(("version", "which"), [(rows.SCHEMA + 1, "a newer"), (rows.SCHEMA - 1, "an older")])
async def test_what_another_version_made_is_refused(tmp_path: Path, version: int, which: str) -> None:
    connection = apsw.Connection(str(tmp_path / "node.db"))
    connection.pragma("user_version", version)
    connection.close()
    with pytest.raises(WrongVersion, match=f"made by {which} barchan") as refused:
        await Registry.open(Layout(tmp_path))
    assert f"`barchan down --delete --data {tmp_path}`" in refused.value.hint
    with pytest.raises(WrongVersion):
        rows.check_version(tmp_path / "node.db")


async def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "node.db").write_bytes(b"not a database" * 500)
    with pytest.raises(InternalError, match="registry"):
        await Registry.open(Layout(tmp_path))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "1m") as place:
        yield place


async def test_a_full_disk_is_named_and_memory_agrees_with_the_file(small: Path) -> None:
    async with await Registry.open(Layout(small)) as registry:
        claimed, full = [], 0
        for number in range(40):
            spec = msgspec.structs.replace(SPEC, labels={"x": os.urandom(20_000).hex()})
            try:
                claimed.append((await claim(registry, f"n-{number}", f"k{number}", spec)).row.id)
            except NodeStorageFull:
                full += 1
                with pytest.raises(NodeStorageFull):
                    await claim(registry, f"n-{number}", f"k{number}", spec)
        assert full and claimed and [row.id for row in registry.live()] == claimed
    async with await Registry.open(Layout(small)) as registry:
        assert {row.id for row in registry.live()} == set(claimed)


WRITER = """
import asyncio, os, sys
from pathlib import Path
from barchan.config import Layout
from barchan.node.registry import Registry
from tests.unit.test_registry import claim

async def work(registry, number):
    for turn in range(1_000_000):
        id = f"n-{number}x{turn}"
        await claim(registry, id, id)
        await registry.update(id, state="ready", pid=turn)
        os.write(1, f"{id} {turn}\\n".encode())

async def main():
    registry = await Registry.open(Layout(Path(sys.argv[1])))
    await asyncio.gather(*(work(registry, number) for number in range(8)))

asyncio.run(main())
"""


def lines_until_killed(data: Path, lines: int) -> list[str]:
    """What the writer had printed when it was killed: one line for each thing acknowledged."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(data)], stdout=subprocess.PIPE, env=env)
    assert writer.stdout is not None
    with writer, writer.stdout as pipe:
        seen = [pipe.readline() for _ in range(lines)]
        writer.kill()
        seen += pipe.readlines()
    return [line.decode() for line in seen if line.endswith(b"\n")]


@pytest.mark.parametrize("round_", range(3))
async def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, round_: int) -> None:
    seen = await asyncio.to_thread(lines_until_killed, tmp_path, random.randrange(1, 200))
    async with await Registry.open(Layout(tmp_path)) as registry:
        for line in seen:
            id, turn = line.split()
            row = registry.get(id)
            assert row is not None and (row.state, row.pid) == ("ready", int(turn))
            assert registry.by_key(id) == row
