"""The rows of `barchan ls`."""

from __future__ import annotations

import msgspec
import pytest

from barchan.cli.sandboxes import row
from barchan.environments import EnvironmentRef, PullProgress
from barchan.spec import Limits, SandboxId, SandboxInfo

DIGEST = "sha256:" + "a" * 64
INFO = SandboxInfo(
    id=SandboxId("n1-01m8qv3bpmpt"), state="creating", backend="container", environment=EnvironmentRef(base="debian-12@3"),
    limits=Limits(), labels={}, created=0.0, last_used=0.0, expires=60.0,
)  # fmt: skip
WAITING = PullProgress(image="docker://a:1", phase="resolve")


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "creating"),
        ({"pulling": WAITING}, "creating (resolve)"),
        (
            {"pulling": msgspec.structs.replace(WAITING, phase="pull", layers=1, done=1, total=3)},
            "creating (pull 33 %)",
        ),
        ({"state": "failed", "reason": "lost"}, "failed (lost)"),
    ],
)
def test_a_sandbox_in_creation_shows_how_far_its_image_is(changes: dict[str, object], state: str) -> None:
    assert row(msgspec.structs.replace(INFO, **changes), 0.0)[1] == state


def test_an_image_is_shown_as_it_was_asked_for_and_the_rest_with_its_version() -> None:
    environment = EnvironmentRef(
        base=f"docker://hub/a@{DIGEST}", toolkits=("tools@4",), asked=("docker://hub/a:1", "tools:stable")
    )
    assert row(msgspec.structs.replace(INFO, environment=environment), 0.0)[3] == "docker://hub/a:1 + tools@4"
    assert row(INFO, 0.0)[3] == "debian-12@3"
