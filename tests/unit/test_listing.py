"""Which sandboxes a list shows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from barchan.node.listing import page
from barchan.node.rows import SandboxRow
from barchan.spec import EnvironmentRef, SandboxSpec
from barchan.wire.messages import ListSandboxes

SPEC = SandboxSpec(
    environment=EnvironmentRef(base="debian-12@3", workspace="work", toolkits=("tools", "sha256:" + "0" * 64)),
    labels={"job": "7", "user": "ann"},
)
ROW = SandboxRow(id="n1-00000005", state="ready", spec=SPEC, digest=b"", created=100.0, last_used=100.0, expires=200.0)


def shown(row: SandboxRow, **filters: Any) -> bool:
    return page([row], ListSandboxes(**filters), "n1") == [row]


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        ({"labels": {"job": "7"}}, {"labels": {"job": "8"}}),
        ({"labels": SPEC.labels}, {"labels": {"job": "7", "more": ""}}),
        ({"states": ("creating", "ready")}, {"states": ("stopping",)}),
        ({"environment": "debian-12"}, {"environment": "debian"}),
        ({"environment": "debian-12@3"}, {"environment": "debian-12@2"}),
        ({"environment": "tools"}, {"environment": "tool"}),
        ({"environment": "sha256:" + "0" * 64}, {"environment": "sha256:" + "1" * 64}),
        ({"backend": "container"}, {"backend": "vm"}),
        ({"node": "n1"}, {"node": "n2"}),
        ({"prefix": "n1-000"}, {"prefix": "n1-1"}),
        ({"created_after": 99.9}, {"created_after": 100.0}),
        ({"created_before": 100.1}, {"created_before": 100.0}),
        ({"after": "n1-00000004"}, {"after": "n1-00000005"}),
        ({}, {"labels": {"job": "7"}, "prefix": "x"}),
    ],
)
def test_each_filter(yes: dict[str, Any], no: dict[str, Any]) -> None:
    assert shown(ROW, **yes) and not shown(ROW, **no)


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        ("docker://debian:12", "docker://debian"),
        ("docker://docker.io/library/debian:12", "docker://ghcr.io/library/debian:12"),
        ("docker://debian@sha256:" + "a" * 64, "docker://debian@sha256:" + "b" * 64),
        ("tools:stable", "tools:next"),
        ("tools", "tool"),
        ("fast", "slow"),
    ],
)
def test_a_sandbox_is_found_by_what_it_was_asked_for_and_by_what_that_meant(yes: str, no: str) -> None:
    environment = EnvironmentRef(
        base="docker://docker.io/library/debian@sha256:" + "a" * 64,
        toolkits=("tools@4", "work@1"),
        asked=("docker://debian:12", "tools:stable", "fast"),
    )
    row = msgspec.structs.replace(ROW, spec=msgspec.structs.replace(SPEC, environment=environment))
    assert shown(row, environment=yes) and not shown(row, environment=no)


def test_the_ended_are_shown_when_asked_for() -> None:
    ended = msgspec.structs.replace(ROW, state="failed", ended=150.0)
    assert not shown(ended) and not shown(ended, states=("ready",), ended=True)
    assert shown(ended, ended=True) and shown(ended, states=("failed",)) and not shown(ended, states=("stopped",))


def test_a_page_is_the_next_in_order_of_ids() -> None:
    rows = [msgspec.structs.replace(ROW, id=f"n1-{number:08}") for number in (3, 1, 2, 5, 4)]
    found = page(rows, ListSandboxes(after="n1-00000001", limit=3), "n1")
    assert [row.id[-1] for row in found] == ["2", "3", "4"]
