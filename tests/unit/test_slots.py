"""Whose turn it is when nodes are busy."""

from __future__ import annotations

import asyncio

from barchan.control.slots import Line, Slots
from barchan.spec import NodeName

A, B = NodeName("a"), NodeName("b")


async def test_a_node_has_so_many() -> None:
    slots = Slots(2)
    async with slots.of(A):
        assert slots.free(A)
        async with slots.of(A):
            assert not slots.free(A) and slots.free(B)
            waiting = asyncio.ensure_future(slots.change())
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
        assert slots.free(A)


async def test_a_cancelled_waiter_is_forgotten() -> None:
    slots = Slots(1)
    async with slots.of(A):
        first, second = asyncio.ensure_future(slots.change()), asyncio.ensure_future(slots.change())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    await second


async def test_a_line_is_first_come_first_served() -> None:
    line, served = Line(Slots(1)), list[int]()

    async def one(number: int) -> None:
        async with line.turn:
            while not line.slots.free(A):
                await line.slots.change()
        async with line.slots.of(A):
            served.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(one(number) for number in range(20)))
    assert served == list(range(20))
