"""`barchan exec -it` on a real terminal, over the scripted backend: what happens to the terminal here."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from barchan.backends.fake import FakeWorld
from barchan.sdk import Client, Sandbox
from tests.contract.api_site import Site, site
from tests.contract.test_shells import linked
from tests.rig import pause
from tests.terminals import LocalTerminal


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path, node_wait=10.0) as it, linked(it, FakeWorld()):
        yield it


@pytest.fixture
async def sandbox(place: Site) -> AsyncIterator[Sandbox]:
    async with place.client() as client:
        yield await client.create("tiny")


@pytest.fixture
async def client(place: Site) -> AsyncIterator[Client]:
    async with place.client() as it:
        yield it


def exec_it(place: Site, sandbox: Sandbox, *argv: str) -> LocalTerminal:
    words = [sys.executable, "-m", "barchan.cli.main", "exec", "--data", str(place.data), "-it", sandbox.id, *argv]
    return LocalTerminal(words, rows=31, columns=99)


async def test_size_and_exit_code(place: Site, sandbox: Sandbox) -> None:
    with exec_it(place, sandbox, "stty", "size") as terminal:
        await asyncio.to_thread(terminal.until, b"31 99")
        assert await asyncio.to_thread(terminal.wait) == 0
        assert terminal.settings() == terminal.before
    with exec_it(place, sandbox, "exit", "41") as terminal:
        assert await asyncio.to_thread(terminal.wait) == 41


async def test_the_size_follows(place: Site, sandbox: Sandbox) -> None:
    with exec_it(place, sandbox, "winch", "2") as terminal:
        await until_raw(terminal)
        terminal.resize(40, 120)
        await asyncio.to_thread(terminal.until, b"40 120")
        terminal.resize(50, 140)
        await asyncio.to_thread(terminal.until, b"50 140")
        assert await asyncio.to_thread(terminal.wait) == 0


async def until_raw(terminal: LocalTerminal) -> None:
    async with asyncio.timeout(60):
        while not terminal.raw:
            await pause()  # the command needs the processor that a loop without pauses would take


async def test_keys_are_bytes(place: Site, sandbox: Sandbox) -> None:
    """ctrl-C, ctrl-\\, ctrl-Z and ctrl-D too: nothing of it is for this side."""
    with exec_it(place, sandbox, "cat") as terminal:
        await until_raw(terminal)
        terminal.type(b"a\x03\x1c\x1a\x04\rb")
        assert await asyncio.to_thread(terminal.until, b"b") == b"a\x03\x1c\x1a\x04\rb", (
            "the scripted one echoes nothing"
        )
        assert terminal.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_a_signal_to_us_restores_the_terminal(place: Site, sandbox: Sandbox, number: signal.Signals) -> None:
    with exec_it(place, sandbox, "cat") as terminal:
        await until_raw(terminal)
        terminal.process.send_signal(number)
        assert await asyncio.to_thread(terminal.wait) == 128 + number
        assert terminal.settings() == terminal.before


async def test_a_lost_server_restores_the_terminal(place: Site, sandbox: Sandbox) -> None:
    with exec_it(place, sandbox, "cat") as terminal:
        await until_raw(terminal)
        await place.stop()
        assert await asyncio.to_thread(terminal.wait) == 125
        assert terminal.settings() == terminal.before
        await asyncio.to_thread(terminal.until, b"[api_unavailable]")


@pytest.mark.parametrize("argv", [("exec", "-it", "{}", "cat"), ("shell", "{}"), ("run", "-it", "tiny", "cat")])
async def test_no_terminal_here(place: Site, sandbox: Sandbox, argv: tuple[str, ...]) -> None:
    words = [word.format(sandbox.id) for word in argv]
    ours = [words[0], "--data", str(place.data), *words[1:]]
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "barchan.cli.main", *ours], input=b"x", capture_output=True, timeout=30
    )
    assert done.returncode == 125
    assert b"the input device is not a TTY" in done.stderr


async def test_output_on_a_terminal_needs_none_here(place: Site, sandbox: Sandbox) -> None:
    words = ["exec", "--data", str(place.data), "-t", sandbox.id, "stty", "size"]
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "barchan.cli.main", *words], input=b"x", capture_output=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (0, b"24 80\n")


@pytest.mark.parametrize("more", ["--json", "-d"])
async def test_what_does_not_go_with_a_terminal(place: Site, sandbox: Sandbox, more: str) -> None:
    words = ["exec", "--data", str(place.data), more, "-t", sandbox.id, "cat"]
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "barchan.cli.main", *words], capture_output=True, timeout=30
    )
    assert done.returncode == 125 and b"invalid_request" in done.stderr


async def test_run_leaves_no_sandbox(place: Site, client: Client) -> None:
    words = [sys.executable, "-m", "barchan.cli.main", "run", "--data", str(place.data), "-it", "tiny", "cat"]
    with LocalTerminal(words) as terminal:
        await until_raw(terminal)
        terminal.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(terminal.wait) == 128 + signal.SIGTERM
    assert await client.list() == ()
