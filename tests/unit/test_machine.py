"""The sandbox's life as a table: what may follow what, and that nothing ever leaves an end."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.node.machine import Event, advance
from barchan.spec import SandboxState

EVENTS: tuple[Event, ...] = get_args(Event)
STATES: tuple[SandboxState, ...] = get_args(SandboxState)


@pytest.mark.parametrize(
    ("state", "event", "then", "action"),
    [
        ("creating", "ready", "ready", "tell_ready"),
        ("creating", "failed", "failing", "remove"),
        ("creating", "stop", "stopping", "remove"),
        ("ready", "stop", "stopping", "remove"),
        ("ready", "expired", "stopping", "remove"),
        ("ready", "lost", "failing", "remove"),
        ("ready", "agent_restarted", "ready", "adopt"),
        ("creating", "agent_restarted", "failing", "remove"),
        ("failing", "agent_restarted", "failing", "remove"),
        ("failing", "cleaned", "failed", "tell_ended"),
        ("stopping", "agent_restarted", "stopping", "remove"),
        ("stopping", "cleaned", "stopped", "tell_ended"),
        ("stopping", "stop", "stopping", "remove"),
        ("failing", "stop", "failing", "remove"),
        ("stopped", "stop", "stopped", "none"),
    ],
)
def test_step(state: SandboxState, event: Event, then: SandboxState, action: str) -> None:
    assert advance(state, event) == (then, action)


@given(st.sampled_from(["stopped", "failed"]), st.lists(st.sampled_from(EVENTS)))
def test_an_end_is_final(state: SandboxState, events: list[Event]) -> None:
    for event in events:
        step = advance(state, event)
        assert step == (state, "none")


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_what_was_made_is_removed_before_it_ends(events: list[Event]) -> None:
    """On any way from `creating` to an end there is exactly one `remove` that is not a repeat after a restart."""
    state: SandboxState = "creating"
    removals = 0
    for event in events:
        step = advance(state, event)
        if step.action == "remove" and state not in ("stopping", "failing"):
            removals += 1
        state = step.state
    assert removals <= 1
    assert (removals == 1) == (state in ("stopping", "stopped", "failing", "failed"))


@given(st.sampled_from(STATES), st.sampled_from(EVENTS))
def test_only_ready_adopts_and_only_creating_becomes_ready(state: SandboxState, event: Event) -> None:
    step = advance(state, event)
    assert step.action != "adopt" or state == "ready"
    assert step.action != "tell_ready" or state == "creating"
