"""The pool over a scripted maker: what is taken, what is made ahead, what is given back."""

from __future__ import annotations

import asyncio
import os

import pytest

from barchan.backends import pool as module
from barchan.backends.container_steps import Draft, Order
from barchan.backends.pool import Pool
from barchan.backends.spawner import Spawned
from barchan.errors import CreateFailed
from barchan.spec import EnvironmentRef, Limits, SandboxSpec

SPEC = SandboxSpec(environment=EnvironmentRef(base="tiny"))


def order(shape: bytes = b"a") -> Order:
    return Order(SPEC, (), shape)


class Shop:
    """Makes drafts whose "process" is a pipe: writing into it is its death."""

    def __init__(self) -> None:
        self.now = 0.0
        self.room = 8
        self.fails = False
        self.takes_time = 0.25
        self.made: list[Draft] = []
        self.discarded: list[Draft] = []
        self.changed = asyncio.Event()
        self._pipes: dict[str, int] = {}

    async def park(self, limits: Limits) -> Draft:
        return self._make(None, limits)

    async def furnish(self, order: Order) -> Draft:
        return self._make(order, order.spec.limits)

    def _make(self, order: Order | None, limits: Limits) -> Draft:
        self.now += self.takes_time
        if self.fails:
            raise CreateFailed("as told")
        name = f"pool-{len(self.made)}"
        read, self._pipes[name] = os.pipe()
        self.made.append(Draft(name, limits, order, Spawned(1, read, (), 1)))
        self.changed.set()
        return self.made[-1]

    async def discard(self, draft: Draft) -> None:
        self.discarded.append(draft)
        self.changed.set()
        self.bury(draft)

    def kill(self, draft: Draft) -> None:
        os.write(self._pipes[draft.name], b"x")

    def bury(self, draft: Draft) -> None:
        os.close(draft.pidfd)
        os.close(self._pipes[draft.name])

    async def until(self, made: int = 0, discarded: int = 0) -> None:
        async with asyncio.timeout(5):
            while len(self.made) < made or len(self.discarded) < discarded:
                self.changed.clear()
                await self.changed.wait()
        await asyncio.sleep(0)


@pytest.fixture
async def shop() -> Shop:
    return Shop()


@pytest.fixture
async def pool(shop: Shop) -> Pool:
    return Pool(shop, 8, lambda: shop.room, lambda: shop.now)


async def test_a_repeated_shape_is_made_ahead_and_taken_whole(pool: Pool, shop: Shop) -> None:
    assert pool.take(order()) is None and pool.take(order()) is None
    await shop.until(made=2)
    ready = pool.take(order())
    assert ready is not None and ready.order == order()
    shop.bury(ready)
    info = pool.info()
    assert (info.hits, info.misses, info.refills, info.refill_ms) == (1, 2, 2, 250.0)
    await pool.close()


async def test_other_shapes_get_parked_children(pool: Pool, shop: Shop) -> None:
    for shape in (b"a", b"b", b"c"):
        assert pool.take(order(shape)) is None
    await shop.until(made=2)
    parked = pool.take(order(b"d"))
    assert parked is not None and parked.order is None
    assert pool.info().parked_hits == 1
    shop.bury(parked)
    await pool.close()


async def test_closing_gives_everything_back(pool: Pool, shop: Shop) -> None:
    for _ in range(4):
        pool.take(order())
    await shop.until(made=3)
    await pool.close()
    assert len(shop.discarded) == len(shop.made) and pool.info().ready == 0
    assert pool.take(order()) is None
    await pool.close()


async def test_what_dies_while_it_waits_is_removed_and_not_handed_out(pool: Pool, shop: Shop) -> None:
    for _ in range(3):
        pool.take(order())
    await shop.until(made=2)
    first = shop.made[0]
    shop.kill(first)
    await shop.until(made=3, discarded=1)
    assert shop.discarded == [first] and first is not pool.take(order())
    await pool.close()


async def test_less_room_means_less_is_held(pool: Pool, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIM_SECONDS", 0.01)
    for _ in range(6):
        pool.take(order())
    await shop.until(made=3)
    shop.room = 1
    await shop.until(discarded=2)
    assert pool.info().ready + pool.info().parked <= 1
    await pool.close()


async def test_a_failed_refill_pauses_and_harms_no_request(pool: Pool, shop: Shop) -> None:
    shop.fails = True
    for _ in range(5):
        assert pool.take(order()) is None
    await asyncio.sleep(0)
    shop.fails = False
    assert pool.take(order()) is None and not shop.made, "it waits before it tries again"
    await asyncio.sleep(0)
    shop.now += module.PAUSE_SECONDS
    pool.take(order())
    await shop.until(made=1)
    await pool.close()


async def test_a_half_full_pool_waits_for_a_quiet_moment(pool: Pool, shop: Shop) -> None:
    shop.takes_time = 0.0
    for _ in range(5):
        pool.take(order())
    await shop.until(made=4)
    await asyncio.sleep(0)
    assert len(shop.made) == 4, "half of the four of this shape that are expected, and of the four of any"
    shop.now += module.QUIET_SECONDS
    await shop.until(made=8)
    await pool.close()


async def test_a_pool_of_none_makes_nothing(shop: Shop) -> None:
    pool = Pool(shop, 0, lambda: 8)
    for _ in range(5):
        assert pool.take(order()) is None
    assert pool.info().misses == 5 and not shop.made
    await pool.close()
