"""kill -9 of everything in turn while sandboxes are made and used: `./dev bench kill` in small, with fixed seeds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kill import Site, play, site
from bench.killer import OFTEN, schedule
from tests.server import PLACE, shared_server

SEED, ROUNDS = 22, 2
BOXES, CLIENTS = 12, 3


@pytest.fixture(scope="module")
def place() -> Iterator[Site]:
    """A server of this module's own: it is started and taken down each round."""
    shared_server()
    with site(Path(os.environ[PLACE] + "-kill"), scratch="512m") as place:
        yield place


def test_the_rounds_kill_everything_once() -> None:
    victims = {kill.victim for number in range(ROUNDS) for kill in schedule(SEED, number)}
    assert victims == set(OFTEN)
    assert schedule(SEED, 0) == schedule(SEED, 0) != schedule(SEED + 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(ROUNDS))
def test_nothing_is_lost_and_nothing_is_left(place: Site, number: int) -> None:
    """CASES 5: killed processes leave nothing."""
    verdict = play(place, SEED, number, BOXES, CLIENTS)
    assert not verdict.wrong, verdict.text()
    assert verdict.killed["node"] and verdict.acknowledged["ran"], "a round in which nothing happens shows nothing"
