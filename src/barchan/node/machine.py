"""The life of a sandbox as a pure state machine: an event in, the next state and what to do out.

    creating ──ready──▶ ready ──stop, expired──▶ stopping ──cleaned──▶ stopped
        │                 │
        ├──failed, lost───┴──lost──▶ failing ──cleaned──▶ failed
        └──stop──▶ stopping

While `stopping` or `failing` everything of it is being removed; only then are its host ids free for another. A stop
in these states means that a removal failed, and tries it again.
Every state change outlives the agent before anybody is told; the record of an end outlives the host. Events that a state does not know change nothing: stopping twice,
losing what is being stopped.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from barchan.spec import SandboxState

Event = Literal["ready", "failed", "stop", "expired", "lost", "cleaned", "agent_restarted"]
Action = Literal["none", "remove", "tell_ready", "tell_ended", "adopt"]


class Step(NamedTuple):
    state: SandboxState
    action: Action


_TABLE: dict[tuple[SandboxState, Event], Step] = {
    ("creating", "ready"): Step("ready", "tell_ready"),
    ("creating", "failed"): Step("failing", "remove"),
    ("creating", "lost"): Step("failing", "remove"),
    ("creating", "agent_restarted"): Step("failing", "remove"),
    ("creating", "stop"): Step("stopping", "remove"),
    ("creating", "expired"): Step("stopping", "remove"),
    ("ready", "stop"): Step("stopping", "remove"),
    ("ready", "expired"): Step("stopping", "remove"),
    ("ready", "lost"): Step("failing", "remove"),
    ("ready", "agent_restarted"): Step("ready", "adopt"),
    ("stopping", "stop"): Step("stopping", "remove"),
    ("stopping", "agent_restarted"): Step("stopping", "remove"),
    ("stopping", "cleaned"): Step("stopped", "tell_ended"),
    ("failing", "stop"): Step("failing", "remove"),
    ("failing", "agent_restarted"): Step("failing", "remove"),
    ("failing", "cleaned"): Step("failed", "tell_ended"),
}


def advance(state: SandboxState, event: Event) -> Step:
    """The state after `event` and the one thing to do about it."""
    return _TABLE.get((state, event), Step(state, "none"))
