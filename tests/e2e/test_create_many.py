"""Many at once, the whole way: SDK → API → node agent → containers."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from barchan import Client, CreateFailed, DataMount, EnvironmentNotFound, Limits, SandboxInfo
from tests.server import Server

MIB = 1 << 20
LITTLE = Limits(memory=32 * MIB, pids=32, disk=8 * MIB)


async def gone(client: Client, labels: dict[str, str], but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Until no sandbox with these labels lives but those."""
    async with asyncio.timeout(60):
        while {info.id for info in await client.list(labels)} - but:
            await asyncio.sleep(0.02)


@pytest.fixture
async def label(client: Client, request: pytest.FixtureRequest) -> AsyncIterator[dict[str, str]]:
    labels = {"test": request.node.name[:40], "run": str(time.time_ns())}
    yield labels
    for info in await client.list(labels):
        await (await client.get(info.id)).stop()


async def test_fifty_that_work(client: Client, tiny_env: str, label: dict[str, str]) -> None:
    async with client.create_many(50, tiny_env, limits=LITTLE, labels=label) as batch:
        running = [asyncio.ensure_future(sandbox.run(["echo", sandbox.id])) async for sandbox in batch]
        assert not batch.failures, batch.failures
    done = await asyncio.gather(*running)
    assert len({result.text for result in done}) == 50 and all(result.exit_code == 0 for result in done)
    found = await client.list(label)
    assert len(found) == 50


async def test_leaving_early_leaves_only_what_was_taken(client: Client, tiny_env: str, label: dict[str, str]) -> None:
    async with client.create_many(60, tiny_env, limits=LITTLE, labels=label) as batch:
        mine = {(await anext(batch)).id for _ in range(5)}
    await gone(client, label, mine)
    assert {info.id for info in await client.list(label)} == mine
    for id in mine:
        assert (await (await client.get(id)).run("echo alive")).text == "alive\n"


async def test_failures_are_typed(client: Client, tiny_env: str, label: dict[str, str]) -> None:
    async with client.create_many(3, "no-such-layer", labels=label) as batch:
        assert [sandbox async for sandbox in batch] == []
    assert sorted(failure.index for failure in batch.failures) == [0, 1, 2]
    assert all(isinstance(failure.error, EnvironmentNotFound) for failure in batch.failures)
    with pytest.raises(CreateFailed) as failed:
        mounts = [DataMount(source="shared", target="/etc/passwd")]
        await client.create_many(4, tiny_env, limits=LITTLE, labels=label, mounts=mounts).all()
    assert failed.value.phase == "data-mount"
    await gone(client, label)


async def test_the_same_key_gives_the_same(client: Client, tiny_env: str, label: dict[str, str]) -> None:
    key = f"k{time.time_ns()}"
    first = await client.create_many(6, tiny_env, key=key, limits=LITTLE, labels=label).all()
    again = await client.create_many(6, tiny_env, key=key, limits=LITTLE, labels=label).all()
    assert {one.id for one in first} == {one.id for one in again}
    assert len(await client.list(label)) == 6


def test_the_command_prints_ids_as_they_come(server: Server, tiny_env: str) -> None:
    run = str(time.time_ns())
    made = server.run("create", tiny_env, "-n", "5", "--label", f"run={run}", "--memory", "32m", "--disk", "8m")
    assert len({one["id"] for one in made}) == 5
    listed = server.run("ls", "--label", f"run={run}", "--state", "ready", "--env", tiny_env)
    found: list[Any] = listed if isinstance(listed, list) else [listed]
    assert {one["id"] for one in found} == {one["id"] for one in made}
    stats = server.run("stats", *(one["id"] for one in made))
    assert {one["id"] for one in stats} == {one["id"] for one in made} and all(one["memory"] > 0 for one in stats)
    server.run("stop", *(one["id"] for one in made))
    assert server.run("ls", "--label", f"run={run}") == []
    ended = server.run("ls", "-a", "--label", f"run={run}", "--newer-than", "1h")
    assert len(ended) == 5 and {one["state"] for one in ended} == {"stopped"} and all(one["ended"] for one in ended)
    assert server.run("ls", "-a", "--label", f"run={run}", "--older-than", "1h") == []


@pytest.mark.parametrize("printed", [1, 7, 20])
def test_what_an_interrupted_command_did_not_print_is_gone(server: Server, tiny_env: str, printed: int) -> None:
    run = f"run={time.time_ns()}"
    argv = server.command("create", tiny_env, "-n", "40", "--label", run, "--memory", "32m", "--disk", "8m")
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ids = {process.stdout.readline().decode().strip() for _ in range(printed)}
        process.send_signal(signal.SIGINT)
        ids |= set(process.stdout.read().decode().split())
        assert process.wait(60) == (0 if len(ids) == 40 else -signal.SIGINT)
    listed = server.run("ls", "--label", run)
    found: list[Any] = listed if isinstance(listed, list) else [listed]
    assert {one["id"] for one in found} == ids
    server.run("stop", *ids)


async def test_lists_are_filtered(client: Client, tiny_env: str, label: dict[str, str]) -> None:
    first, second = await client.create_many(2, tiny_env, limits=LITTLE, labels=label).all()
    await second.stop()

    async def ids(**filters: Any) -> list[str]:
        return [info.id for info in await client.list(label, **filters)]

    assert await ids() == [first.id]
    assert sorted(await ids(ended=True)) == sorted([first.id, second.id])
    assert await ids(states=["stopped"]) == [second.id]
    assert await ids(states=["ready"], ended=True) == [first.id]
    assert await ids(environment="tiny@1") in ([], [first.id]) and await ids(environment="tiny") == [first.id]
    assert await ids(environment="other") == [] == await ids(backend="vm")
    assert await ids(node="test") == [first.id]
    assert await ids(prefix=first.id[:-4]) == [first.id] and await ids(prefix="nowhere-") == []
    created = first.info.created
    assert await ids(created_after=created - 1, created_before=created + 1) == [first.id]
    assert await ids(created_after=created + 600) == [] == await ids(created_before=created - 600)
    info: SandboxInfo = (await client.list(label, states=["stopped"]))[0]
    assert info.ended > info.created and json.dumps(info.reason)
