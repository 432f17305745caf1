"""Removal after the answer: nothing is lost, nothing waits without bound."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from barchan.backends import removals as module
from barchan.backends.removals import AT_ONCE, MOST, Removals


class Host:
    """Removes by name; holds removals back while `gate` is closed."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.easy: set[str] = set()
        self.asked: list[list[str]] = []
        self.busy: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    async def first(self, names: list[str]) -> list[str]:
        self.asked.append(names)
        return [name for name in names if name not in self.easy]

    def sweep(self, name: str) -> None:
        assert self.gate.wait(5)
        if name in self.busy:
            raise OSError(errno.EBUSY, "busy")
        self.gone.append(name)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


async def test_what_is_added_goes_without_being_waited_for(host: Host, threads: ThreadPoolExecutor) -> None:
    removals = Removals(host.first, host.sweep, threads)
    host.gate.clear()
    for number in range(MOST):
        await removals.add(str(number))
    assert len(removals.pending) == MOST and not host.gone
    host.gate.set()
    await removals.drain()
    assert not removals.pending and sorted(host.gone) == sorted(str(n) for n in range(MOST))
    assert max(map(len, host.asked)) > 1, "many go together"


async def test_only_what_does_not_go_at_once_is_swept(host: Host, threads: ThreadPoolExecutor) -> None:
    removals = Removals(host.first, host.sweep, threads)
    host.easy = {"a", "c"}
    for name in "abc":
        await removals.add(name)
    await removals.drain()
    assert host.gone == ["b"] and not removals.pending


async def test_space_is_asked_back_after_each_group(host: Host, threads: ThreadPoolExecutor) -> None:
    gone: list[int] = []

    async def after() -> None:
        gone.append(len(host.gone))

    removals = Removals(host.first, host.sweep, threads, after)
    for number in range(AT_ONCE + 1):
        await removals.add(str(number))
    await removals.drain()
    assert gone == [AT_ONCE, AT_ONCE + 1]


async def test_beyond_its_bound_the_adder_waits(host: Host, threads: ThreadPoolExecutor) -> None:
    removals = Removals(host.first, host.sweep, threads)
    host.gate.clear()
    for number in range(MOST):
        await removals.add(str(number))
    over = asyncio.ensure_future(removals.add("over"))
    done, _ = await asyncio.wait([over], timeout=0.05)
    assert not done
    host.gate.set()
    await over
    assert "over" in host.gone


async def test_a_failed_removal_is_tried_again(
    host: Host, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    removals = Removals(host.first, host.sweep, threads)
    host.busy = {"a"}
    await removals.add("a")
    await removals.add("b")
    await removals.drain()
    assert host.gone == ["b"] and removals.pending == {"a"}
    host.busy = set()
    async with asyncio.timeout(5):
        while removals.pending:
            await asyncio.sleep(0)
    assert host.gone == ["b", "a"]


async def test_closing_tries_everything_once_more_and_ends(host: Host, threads: ThreadPoolExecutor) -> None:
    removals = Removals(host.first, host.sweep, threads)
    host.busy = {"a", "b"}
    await removals.add("a")
    await removals.add("b")
    await removals.drain()
    host.busy = {"b"}
    await removals.close()
    assert host.gone == ["a"] and removals.pending == {"b"}
