"""Many sandboxes by one request: through SDK and API on real sockets, with scripted nodes behind them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan.control.many import AHEAD
from barchan.errors import (
    AdmissionRefused,
    Conflict,
    CreateFailed,
    EnvironmentNotFound,
    InvalidRequest,
    from_body,
)
from barchan.sdk import Client, Sandbox
from barchan.spec import EnvironmentRef, SandboxInfo, SandboxSpec
from barchan.wire import messages as m
from barchan.wire.link import Incoming
from tests.contract.api_site import Site, http, site
from tests.contract.fake_node import FakeNode
from tests.rig import cut

SPEC = SandboxSpec(environment=EnvironmentRef(base="debian-12"))


class Node(FakeNode):
    """Answers each create by what `script` says of its index: an error to fail with, an event to wait for, or nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.script: dict[int, Exception | asyncio.Event] = {}
        self.abandoned: list[str] = []
        self.at_once = 0
        self.most_at_once = 0

    async def _sandbox_create(self, call: Incoming, request: m.CreateSandbox) -> SandboxInfo:
        what = self.script.get(int(request.key.rpartition(".")[2]))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if isinstance(what, asyncio.Event):
                await what.wait()
            elif what is not None:
                raise what
            return await super()._sandbox_create(call, request)
        finally:
            self.at_once -= 1

    async def _sandbox_abandon(self, call: Incoming, request: m.AbandonCreate) -> None:
        self.abandoned.append(request.key)
        if request.key in self.keys:
            self._change(self.keys[request.key][1], state="stopped", reason="abandoned")

    def alive(self) -> set[str]:
        return {id for id, info in self.sandboxes.items() if info.state == "ready"}


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path, batch_wait=0.3) as it:
        yield it


@pytest.fixture
async def node(place: Site) -> AsyncIterator[Node]:
    async with Node(place.layout.node_socket) as it:
        yield it


@pytest.fixture
async def client(place: Site, node: Node) -> AsyncIterator[Client]:
    async with place.client() as it:
        yield it


async def until(condition: Any) -> None:
    async with asyncio.timeout(40):
        while not condition():
            await asyncio.sleep(0.005)


async def taken(batch: AsyncIterator[Sandbox], count: int) -> list[Sandbox]:
    return [await anext(batch) for _ in range(count)]


async def test_every_one_comes_once(client: Client, node: Node) -> None:
    async with client.create_many(300, "debian-12", labels={"job": "7"}) as batch:
        found = [sandbox async for sandbox in batch]
        assert not batch.failures
    assert len(found) == len({sandbox.id for sandbox in found}) == 300 == len(node.alive())
    assert all(sandbox.info.labels == {"job": "7"} for sandbox in found)
    assert all(sandbox.info.queued_ms > 0 for sandbox in found), "queue time is reported"
    assert not node.abandoned, "what was handed over stays"


async def test_slow_ones_hold_up_nobody_and_failures_are_typed(client: Client, node: Node) -> None:
    slow, full = asyncio.Event(), AdmissionRefused("no room", field="limits.memory")
    node.script = {index: slow for index in range(0, 500, 20)}
    node.script |= {index: CreateFailed("broken", phase="mount") for index in range(1, 500, 100)} | {2: full}
    async with client.create_many(500, "debian-12") as batch:
        quick = await taken(batch, 500 - 25 - 6)
        assert len(quick) == 469
        slow.set()
        rest = [sandbox async for sandbox in batch]
    assert len(rest) == 25
    found = {failure.index: failure.error for failure in batch.failures}
    assert set(found) == {1, 2, 101, 201, 301, 401}
    assert isinstance(found[2], AdmissionRefused) and found[2].retry
    assert isinstance(found[101], CreateFailed) and found[101].phase == "mount"


async def test_a_node_works_on_so_many_at_once(client: Client, node: Node) -> None:
    gate = asyncio.Event()
    node.script = dict.fromkeys(range(200), gate)
    async with client.create_many(200, "debian-12") as batch:
        first = asyncio.ensure_future(anext(batch))
        await until(lambda: node.at_once == 64)
        assert (await client.create("debian-12", key="single.999")).info.state == "ready", "a single one does not queue"
        gate.set()
        await first
        assert len([sandbox async for sandbox in batch]) == 199
    assert node.most_at_once == 65


async def test_several_nodes_share_and_a_stuck_one_delays_nobody(place: Site, client: Client, node: Node) -> None:
    async with Node(place.layout.node_socket, "n2") as other:
        stuck = asyncio.Event()
        other.create_gate = stuck
        async with client.create_many(400, "debian-12") as batch:
            quick = await taken(batch, 400 - 64)
            assert {sandbox.id.partition("-")[0] for sandbox in quick} == {"n1"}
            stuck.set()
            assert len([sandbox async for sandbox in batch]) == 64


async def test_leaving_early_removes_what_was_not_handed_over(client: Client, node: Node) -> None:
    never = asyncio.Event()
    node.script = dict.fromkeys(range(20, 40), never)
    async with client.create_many(1000, "debian-12") as batch:
        mine = {sandbox.id for sandbox in await taken(batch, 30)}
    await until(lambda: node.alive() == mine)
    await until(lambda: node.at_once == 0)
    assert len(node.sandboxes) <= 30 + AHEAD, "the rest was never begun"


async def test_a_cancelled_caller_leaves_nothing(client: Client, node: Node) -> None:
    begun = asyncio.Event()

    async def use() -> None:
        async with client.create_many(50, "debian-12") as batch:
            async for _ in batch:
                begun.set()
                await asyncio.Event().wait()

    task = asyncio.ensure_future(use())
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: len(node.alive()) == 1)


async def test_when_the_block_is_left_nothing_is_left_to_remove(client: Client, node: Node) -> None:
    """What only is sent when a process ends may never be read: the block waits until it was done."""
    async with client.create_many(50, "debian-12") as batch:
        mine = {sandbox.id for sandbox in await taken(batch, 7)}
    assert node.alive() == mine


async def test_a_cancelled_all_leaves_nothing(client: Client, node: Node) -> None:
    never = asyncio.Event()
    node.script = {49: never}
    task = asyncio.ensure_future(client.create_many(50, "debian-12").all())
    await until(lambda: len(node.alive()) == 49)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not node.alive() and not node.at_once)


async def test_a_batch_that_another_call_took_over_is_not_ended(client: Client, node: Node) -> None:
    never = asyncio.Event()
    node.script = {9: never}
    async with client.create_many(10, "debian-12", key="shared") as second:
        with pytest.raises(Conflict):
            async with client.create_many(10, "debian-12", key="shared") as first:
                await taken(first, 3)
                await taken(second, 2)
                await taken(first, 10)
        never.set()
        assert len([sandbox async for sandbox in second]) == 8
    assert len(node.alive()) == 10


async def test_a_caller_that_gives_up_and_hangs_up_in_one_breath_gave_up(tmp_path: Path) -> None:
    async with site(tmp_path, batch_wait=600) as place, Node(place.layout.node_socket) as node:
        async with place.client() as client:
            batch = client.create_many(10, "debian-12")
            await taken(batch, 1)
            await until(lambda: len(node.alive()) == 10)
            assert batch._arrivals is not None
            batch._arrivals.abandon()
        await until(lambda: len(node.alive()) == 1)


async def test_no_more_are_made_than_can_be_taken(client: Client, node: Node) -> None:
    async with client.create_many(2000, "debian-12") as batch:
        await taken(batch, 10)
        await until(lambda: len(node.sandboxes) == AHEAD + 10)
        await client.nodes()
        assert len(node.sandboxes) == AHEAD + 10, "a caller that stands still stops the making"
        await taken(batch, 100)
        await until(lambda: len(node.sandboxes) == AHEAD + 110)
    await until(lambda: len(node.alive()) == 110)


async def test_a_lost_connection_goes_on_with_the_same(place: Site, client: Client, node: Node) -> None:
    async with client.create_many(300, "debian-12") as batch:
        found = await taken(batch, 40)
        await place.stop()
        await place.start(batch_wait=0.3)
        await node.dial()
        found += [sandbox async for sandbox in batch]
    assert len(found) == len({sandbox.id for sandbox in found}) == 300
    assert not batch.failures and len(node.alive()) == 300, "none twice, none missing"


async def test_a_broken_socket_goes_on_with_the_same(client: Client, node: Node) -> None:
    async with client.create_many(300, "debian-12") as batch:
        found = await taken(batch, 40)
        cut(client)
        found += [sandbox async for sandbox in batch]
        await asyncio.sleep(0.5)  # longer than a lost caller is waited for
    assert len({sandbox.id for sandbox in found}) == 300 == len(node.alive()), "the first call's end takes nothing away"


async def test_what_a_dead_client_never_got_goes(place: Site, node: Node) -> None:
    async with place.client() as client:
        batch = client.create_many(100, "debian-12")
        mine = {sandbox.id for sandbox in await taken(batch, 7)}
        await until(lambda: len(node.sandboxes) == 100)
        # The client ends without a word, as one that was killed.
    await until(lambda: node.alive() == mine)


CLIENT = """
import asyncio, sys
from barchan.sdk import Client

async def main():
    async with Client(data=sys.argv[1]) as client, client.create_many(40, "debian-12") as batch:
        mine = [(await anext(batch)).id for _ in range(3)]
        await client.nodes()  # what was said before has arrived
        print(*mine, sep="\\n", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_what_a_killed_client_never_got_goes(place: Site, node: Node) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(place.data), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    mine = {(await process.stdout.readline()).decode().strip() for _ in range(3)}
    await until(lambda: len(node.alive()) == 40)
    process.kill()
    await process.wait()
    await until(lambda: node.alive() == mine)


@pytest.mark.parametrize(
    "moment", ["begun:1", "begun:30", "made:1", "made:45", "made:89", *(f"printed:{n}" for n in (1, 2, 20, 60, 89))]
)
async def test_an_interrupted_command_leaves_what_it_printed(tmp_path: Path, moment: str) -> None:
    """By the time it has ended the rest is gone, and it ends of the interrupt whenever that came."""
    what, _, number = moment.partition(":")
    async with site(tmp_path, batch_wait=600) as place, Node(place.layout.node_socket) as node:
        if what == "begun":
            node.create_gate = asyncio.Event()
        node.script = {int(number): asyncio.Event()} if what != "begun" else {}
        argv = ("-m", "barchan.cli.main", "create", "debian-12", "-n", "90", "--data", str(place.data))
        process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        printed = set()
        if what == "printed":
            printed = {(await process.stdout.readline()).decode().strip() for _ in range(int(number))}
        elif what == "begun":
            await until(lambda: node.at_once >= int(number))
        else:
            await until(lambda: len(node.sandboxes) >= int(number))
        process.send_signal(signal.SIGINT)
        printed |= set((await process.stdout.read()).decode().split())
        assert await process.wait() == -signal.SIGINT
        assert node.alive() == printed and not node.at_once


COMMAND = """
import os
os.write(1, b"python is up\\n")
from barchan.__main__ import main
main()
"""


@pytest.mark.parametrize("late", range(0, 300, 20))
async def test_an_interrupt_at_any_time_ends_the_command(place: Site, node: Node, late: int) -> None:
    """So many milliseconds after Python began: while modules are imported, while it dials, while it waits."""
    node.create_gate = asyncio.Event()
    argv = ("-c", COMMAND, "create", "debian-12", "-n", "3", "--data", str(place.data))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"python is up\n"
    await asyncio.sleep(late / 1000)
    process.send_signal(signal.SIGINT)
    _, said = await process.communicate()
    assert process.returncode == -signal.SIGINT, said
    assert not node.sandboxes and not node.at_once


async def test_leaving_while_the_connection_is_lost_is_told_later(place: Site, client: Client, node: Node) -> None:
    async with client.create_many(100, "debian-12") as batch:
        mine = {sandbox.id for sandbox in await taken(batch, 7)}
        await until(lambda: len(node.sandboxes) == 100)
        await place.stop()
        await until(lambda: batch._arrivals.error is not None)
    await place.start()
    await node.dial()
    await until(lambda: node.alive() == mine)


async def test_a_key_gives_the_same_again(client: Client, node: Node) -> None:
    first = await client.create_many(20, "debian-12", key="job-7").all()
    again = await client.create_many(20, "debian-12", key="job-7").all()
    assert {one.id for one in first} == {one.id for one in again} and len(node.sandboxes) == 20
    more = await client.create_many(25, "debian-12", key="job-7").all()
    assert {one.id for one in first} < {one.id for one in more}


async def test_all_or_none(client: Client, node: Node) -> None:
    node.script = {17: EnvironmentNotFound("not here")}
    with pytest.raises(EnvironmentNotFound):
        async with client.create_many(40, "debian-12") as batch:
            await batch.all()
    await until(lambda: not node.alive())


async def test_a_node_that_goes_away_meanwhile_is_asked_again(client: Client, node: Node) -> None:
    gate = asyncio.Event()
    node.script = dict.fromkeys(range(10), gate)
    async with client.create_many(10, "debian-12") as batch:
        first = asyncio.ensure_future(anext(batch))
        await until(lambda: node.at_once == 10)
        node.blink()
        gate.set()
        await first
        assert len([sandbox async for sandbox in batch]) == 9
    assert not batch.failures and len(node.sandboxes) == 10


async def test_what_a_vanished_node_may_have_made_is_removed_when_it_is_back(client: Client, node: Node) -> None:
    gate = asyncio.Event()
    node.script = {3: gate}
    async with client.create_many(5, "debian-12", key="k") as batch:
        found = await taken(batch, 4)
        node.drop()
        with pytest.raises(StopAsyncIteration):
            await anext(batch)
        assert [(failure.index, failure.error.code) for failure in batch.failures] == [(3, "node_unavailable")]
        late = m.CreateSandbox(spec=SPEC, key="k.3")
        await FakeNode._sandbox_create(node, None, late)  # type: ignore[arg-type]  # it had been sent before
        await node.dial()
        await until(lambda: node.abandoned == ["k.3"])
    assert node.alive() == {sandbox.id for sandbox in found}


@pytest.mark.parametrize(("count", "key"), [(0, "k"), (-1, "k"), (10_001, "k"), (1, "k" * 57), (1, "a b")])
async def test_what_cannot_be_asked(client: Client, count: int, key: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await client.create_many(count, "debian-12", key=key).all()
    assert refused.value.field == ("key" if count == 1 else "count")


async def test_wrong_options_are_refused_at_once(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="colour"):
        client.create_many(2, "debian-12", colour="red")  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest):
        client.create_many(2)


# over HTTP


def lines(body: bytes) -> list[m.Created]:
    return [msgspec.json.decode(line, type=m.Created) for line in body.splitlines()]


async def test_http_answers_line_by_line(place: Site, node: Node) -> None:
    slow = asyncio.Event()
    node.script = {0: slow, 1: CreateFailed("broken", phase="mount")}
    async with http(place.url) as ask:
        body = msgspec.json.encode(SPEC)
        async with ask.raw("POST", "/v1/sandboxes?count=50", data=body) as reply:
            assert reply.status == 200 and reply.content_type == "application/x-ndjson"
            head = [await reply.content.readline() for _ in range(49)]
            slow.set()
            found = lines(b"".join(head) + await reply.content.read())
    assert sorted(one.index for one in found) == list(range(50)) and found[-1].index == 0
    failed = [one for one in found if one.error is not None]
    assert [one.index for one in failed] == [1] and isinstance(from_body(failed[0].error), CreateFailed)  # type: ignore[arg-type]
    assert len(node.alive()) == 49


@pytest.mark.parametrize("key", [None, "again"])
async def test_http_hanging_up_gives_the_batch_up(place: Site, node: Node, key: str | None) -> None:
    node.script = {7: asyncio.Event()}
    headers = {} if key is None else {"Idempotency-Key": key}
    async with http(place.url) as ask:
        reply = await ask.raw("POST", "/v1/sandboxes?count=20", data=msgspec.json.encode(SPEC), headers=headers)
        for _ in range(19):
            await reply.content.readline()
        reply.close()
    await until(lambda: len(node.sandboxes) == 19 and not node.alive())


async def test_http_comes_back_with_its_key(place: Site, node: Node) -> None:
    gate = asyncio.Event()
    node.script = {7: gate}
    headers = {"Idempotency-Key": "again"}
    async with http(place.url) as ask:
        reply = await ask.raw("POST", "/v1/sandboxes?count=20", data=msgspec.json.encode(SPEC), headers=headers)
        first = lines(b"".join([await reply.content.readline() for _ in range(19)]))
        reply.close()
        gate.set()
        async with ask.raw("POST", "/v1/sandboxes?count=20", data=msgspec.json.encode(SPEC), headers=headers) as reply:
            again = lines(await reply.content.read())
    known = {one.sandbox.id for one in first if one.sandbox}
    assert known < {one.sandbox.id for one in again if one.sandbox} == node.alive()


@pytest.mark.parametrize("count", ["0", "10001", "x", "-3"])
async def test_http_count_out_of_range(place: Site, node: Node, count: str) -> None:
    async with http(place.url) as ask:
        status, body = await ask("POST", f"/v1/sandboxes?count={count}", SPEC)
    assert (status, body["field"]) == (400, "count")
