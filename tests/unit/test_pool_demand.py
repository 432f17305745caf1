"""How many sandboxes to hold ready: pure decisions over time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from barchan.backends.demand import HALF_LIFE, SHAPES, Demand, Plan

MOST = 16
A, B = b"a", b"b"


def asked(*times: tuple[float, bytes], ready: bool = False) -> Demand:
    demand = Demand(MOST)
    for at, shape in times:
        demand.note(shape, at, ready=ready)
    return demand


def test_nothing_is_held_without_demand() -> None:
    assert Demand(MOST).plan(MOST, 0) == Plan({}, 0)


def test_a_single_request_is_no_pattern() -> None:
    assert asked((0, A)).plan(MOST, 0) == Plan({}, 0)


def test_a_shape_that_comes_again_is_expected() -> None:
    assert asked((0, A), (1, A)).plan(MOST, 1).ready == {A: 1}


def test_a_stream_fills_the_pool_and_silence_empties_it() -> None:
    demand = asked(*((at / 10, A) for at in range(1000)))
    assert demand.plan(MOST, 100).ready == {A: MOST}
    assert demand.plan(MOST, 100 + 2 * HALF_LIFE).ready == {A: 3}
    assert demand.plan(MOST, 100 + 6 * HALF_LIFE) == Plan({}, 0)


def test_different_shapes_are_prepared_for_by_parked_children() -> None:
    demand = asked(*((at / 10, str(at).encode()) for at in range(10)))
    assert demand.plan(MOST, 1) == Plan({}, 9)


def test_what_a_ready_one_served_needs_no_parked_child() -> None:
    assert asked((0, A), (0.1, A), (0.2, A), ready=True).plan(MOST, 0.2) == Plan({A: 2}, 0)


def test_the_most_wanted_shape_comes_first_when_room_is_short() -> None:
    demand = asked(*[(0, A)] * 6, *[(0, B)] * 4)
    assert demand.plan(6, 0) == Plan({A: 5, B: 1}, 0)


def test_shapes_seldom_asked_for_are_forgotten() -> None:
    demand = asked(*[(0, A)] * 5, *((1, str(n).encode()) for n in range(2 * SHAPES)))
    assert demand.plan(MOST, 1).ready == {A: 4}


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.binary(max_size=2), st.booleans()), max_size=100), st.integers(-3, MOST)
)
def test_a_plan_never_exceeds_its_room(requests: list[tuple[float, bytes, bool]], room: int) -> None:
    demand = Demand(MOST)
    for at, shape, ready in requests:
        demand.note(shape, at, ready=ready)
        plan = demand.plan(room, at)
        assert sum(plan.ready.values()) + plan.parked <= max(room, 0)
        assert all(count > 0 for count in plan.ready.values()) and plan.parked >= 0
