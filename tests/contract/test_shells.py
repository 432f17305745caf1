"""Shell sessions and terminals from the SDK through API and node agent, over the scripted backend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from barchan import errors
from barchan.backends.fake import FakeBackend, FakeWorld
from barchan.node.agent import Agent
from barchan.node.server import keep_linked
from barchan.sdk import Client, Sandbox, Shell
from barchan.trajectory.record import Record, Resize
from barchan.wire import messages as m
from tests.contract.api_site import Site, http, site
from tests.contract.node_rig import Caller, agent_on, config_for


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


@contextlib.asynccontextmanager
async def linked(place: Site, world: FakeWorld) -> AsyncIterator[Agent]:
    """A node agent that answers for the API; leaving it is its death."""
    greeted = asyncio.Event()
    async with agent_on(config_for(place.data), FakeBackend(world)) as agent:
        linking = asyncio.create_task(keep_linked(agent, place.layout.node_socket, greeted.set))
        try:
            await greeted.wait()
            yield agent
        finally:
            linking.cancel()
            await asyncio.gather(linking, return_exceptions=True)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path, node_wait=10.0) as it:
        yield it


@pytest.fixture
async def agent(place: Site, world: FakeWorld) -> AsyncIterator[Agent]:
    async with linked(place, world) as it:
        yield it


@pytest.fixture
async def client(place: Site) -> AsyncIterator[Client]:
    async with place.client() as it:
        yield it


@pytest.fixture
async def sandbox(agent: Agent, client: Client) -> Sandbox:
    return await client.create("tiny")


async def records(agent: Agent, sandbox: Sandbox) -> list[Record]:
    return [record async for record in agent.recorder.history(sandbox.id)]


# sessions


async def test_commands_share_what_they_leave_behind(sandbox: Sandbox) -> None:
    async with sandbox.shell() as one, sandbox.shell() as two:
        assert (await one.run("pwd")).stdout == b"/\n"
        done = await one.run("cd /srv")
        assert (done.outcome, done.exit_code) == ("exited", 0)
        assert (await one.run("pwd")).stdout == b"/srv\n"
        assert (await two.run("pwd")).stdout == b"/\n", "another session is another shell"


async def test_calls_wait_their_turn(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        lines = [f"echo {i}" for i in range(20)]
        results = await asyncio.gather(*(shell.run(line) for line in lines))
        assert [r.text for r in results] == [f"{i}\n" for i in range(20)]
    begun = [info.argv[0].decode() for info in await sandbox.execs() if info.shell == shell.id]
    assert begun == lines, "in the order of the calls"


async def test_a_started_command_is_waited_for(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        process = await shell.start("flood 3000000")
        after = asyncio.create_task(shell.run("echo after"))
        assert len(await process.stdout.read_all()) == 3_000_000
        assert (await after).stdout == b"after\n"
        assert (await process.wait()).exit_code == 0


async def test_another_client_may_find_it_busy(sandbox: Sandbox, client: Client) -> None:
    async with sandbox.shell(id="shared") as shell:
        process = await shell.start("sleep 60")
        other = (await client.get(sandbox.id)).shell(id="shared")
        await other.open()
        with pytest.raises(errors.ShellBusy, match="another command"):
            await other.run("echo no")
        await process.cancel()
        assert (await shell.run("cd /both")).exit_code == 0
        assert (await other.run("pwd")).stdout == b"/both\n", "the same shell"


async def test_a_cancelled_call_ends_its_command_first(sandbox: Sandbox) -> None:
    """However early it is cancelled, the next one finds the shell free."""
    async with sandbox.shell() as shell:
        for turns in (1, 2, 3, 5, 8, 13, 21):
            waiting = asyncio.create_task(shell.run("sleep 60", id=f"cut-{turns}"))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            assert (await shell.run("echo next")).stdout == b"next\n"
            assert waiting.cancelled()
    cut = {info.id: info.result for info in await sandbox.execs() if info.id.startswith("cut-")}
    assert cut, "some of them ran"
    assert all(result is not None and result.outcome == "cancelled" for result in cut.values())


async def test_a_command_can_end_the_shell(sandbox: Sandbox) -> None:
    shell = sandbox.shell()
    await shell.open()
    done = await shell.run("exit 3")
    assert (done.outcome, done.exit_code) == ("exited", 3)
    with pytest.raises(errors.ShellEnded, match="exit code 3"):
        await shell.run("pwd")
    with pytest.raises(errors.ShellEnded, match="exit code 3"):
        await shell.open()
    await shell.close()


async def test_closing_is_for_good(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        await shell.run("pwd", id="known")
    await shell.close()
    with pytest.raises(errors.ShellEnded, match="cancelled"):
        await shell.run("pwd")
    session = next(info for info in await sandbox.execs() if info.id == shell.id)
    assert session.argv == () and session.result is not None and session.result.outcome == "cancelled"
    assert (await shell.run("pwd", id="known")).stdout == b"/\n", "what is recorded is answered from the record"


async def test_a_shell_goes_with_its_sandbox(sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        await sandbox.stop()
        with pytest.raises(errors.SandboxStopped):
            await shell.run("pwd")


async def test_what_is_no_session(sandbox: Sandbox) -> None:
    with pytest.raises(errors.ExecNotFound) as unknown:
        await Shell(sandbox._connection, sandbox.id, "nobody", sandbox.shell()._request).run("pwd")
    assert unknown.value.field == "shell"
    process = await sandbox.start(["sleep", "60"])
    with pytest.raises(errors.InvalidRequest, match="no shell session"):
        await Shell(sandbox._connection, sandbox.id, process.id, sandbox.shell()._request).run("pwd")
    await process.cancel()


async def test_a_session_outlives_agent_and_link(place: Site, client: Client, world: FakeWorld) -> None:
    async with linked(place, world):
        sandbox = await client.create("tiny")
        shell = sandbox.shell()
        await shell.open()
        await shell.run("cd /kept")
        process = await shell.start("sleep 60")
    async with linked(place, world):
        assert process.id in {info.id for info in await sandbox.execs() if info.result is None}
        await process.cancel()
        assert (await process.wait()).outcome == "cancelled"
        assert (await shell.run("pwd")).stdout == b"/kept\n"
        await shell.close()
    async with linked(place, world):
        with pytest.raises(errors.ShellEnded, match="cancelled"):
            await shell.run("pwd")


async def test_an_idle_session_does_not_keep_a_sandbox_busy(agent: Agent, sandbox: Sandbox) -> None:
    async with sandbox.shell() as shell:
        live = agent.sandboxes[sandbox.id]
        attached = Caller(agent).attach(sandbox.id, shell.id)
        await attached.started
        assert not live.busy
        process = await shell.start("sleep 60")
        assert live.busy
        await process.cancel()


async def test_early_cancels_leave_no_caller_behind(agent: Agent, sandbox: Sandbox) -> None:
    for turns in range(1, 25):
        running = asyncio.create_task(sandbox.run(["sleep", "60"]))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(5):
        while agent.sandboxes[sandbox.id].busy:
            await asyncio.sleep(0)
        while any(info.result is None for info in await sandbox.execs()):
            await asyncio.sleep(0)


# terminals


async def test_a_terminal_has_a_size(agent: Agent, sandbox: Sandbox) -> None:
    async with await sandbox.tty(["stty", "size"], rows=33, columns=101) as terminal:
        assert await terminal.read() == b"33 101\n"
        assert (await terminal.wait()).exit_code == 0
        with pytest.raises(errors.ExecNotFound):
            await terminal.resize(1, 1)
    async with await sandbox.tty(["winch", "2"]) as terminal:
        for rows, columns in ((40, 120), (50, 140)):
            await terminal.resize(rows, columns)
            assert await terminal.read() == b"%d %d\n" % (rows, columns)
        assert (await terminal.wait()).exit_code == 0
    sizes = [record.body for record in await records(agent, sandbox) if isinstance(record.body, Resize)]
    assert sizes == [Resize(40, 120), Resize(50, 140)], "recorded"


@pytest.mark.parametrize(("rows", "columns"), [(0, 80), (24, 65536), (-1, 80)])
async def test_sizes_that_no_terminal_has(sandbox: Sandbox, rows: int, columns: int) -> None:
    with pytest.raises(errors.InvalidRequest):
        await sandbox.tty(["stty", "size"], rows=rows, columns=columns)
    async with await sandbox.tty(["cat"]) as terminal:
        with pytest.raises(errors.InvalidRequest):
            await terminal.resize(rows, columns)


async def test_typing(sandbox: Sandbox) -> None:
    async with await sandbox.tty(["cat"]) as terminal:
        await terminal.write("typed")
        assert await terminal.read() == b"typed"
        await terminal.write(b"\x03\x00\xff")
        assert await terminal.read() == b"\x03\x00\xff"
        terminal.end_input()
        assert [chunk async for chunk in terminal] == []
        assert (await terminal.wait()).outcome == "exited"


async def test_leaving_the_block_ends_the_program(sandbox: Sandbox) -> None:
    async with await sandbox.tty(["cat"]) as terminal:
        pass
    assert (await terminal.wait()).outcome == "cancelled"


async def test_a_size_is_told_again_on_a_new_link(sandbox: Sandbox, world: FakeWorld) -> None:
    async with await sandbox.tty(["winch", "2"]) as terminal:
        await terminal.resize(40, 120)
        assert await terminal.read() == b"40 120\n"
        world.guests[sandbox.id].hang_up()
        assert await terminal.read() == b"40 120\n"


async def test_sizes_are_checked_by_the_node_too(agent: Agent, sandbox: Sandbox) -> None:
    caller = Caller(agent)
    with pytest.raises(errors.InvalidRequest):
        await caller.ask(m.ResizeExec(sandbox=sandbox.id, id="x", size=m.Terminal(rows=0)))


@pytest.mark.parametrize("field", ["tty", "opens_shell", "shell"])
async def test_plain_http_has_no_terminals(place: Site, sandbox: Sandbox, field: str) -> None:
    async with http(place.url) as ask:
        status, body = await ask("POST", f"/v1/sandboxes/{sandbox.id}/exec", {"cmd": "true", field: {}})
    assert (status, body["code"], body["field"]) == (400, "invalid_request", field)
