from __future__ import annotations

import msgspec
import pytest

from barchan.errors import AdmissionRefused, InvalidRequest
from barchan.node.admission import Room, admit
from barchan.spec import GIB, MIB, Limits

ROOM = Room(
    sandboxes=3,
    most_sandboxes=10,
    memory=8 * GIB,
    memory_promised=2 * GIB,
    memory_available=4 * GIB,
    disk=64 * GIB,
    disk_promised=8 * GIB,
    disk_size=4 * GIB,
    disk_free=4 * GIB,
    pids_free=10_000,
    files_free=1_000_000,
)


def test_there_is_room() -> None:
    admit(ROOM, Limits())


@pytest.mark.parametrize(
    ("change", "resource"),
    [
        ({"sandboxes": 10}, "sandboxes"),
        ({"memory_promised": 8 * GIB - 100 * MIB}, "memory"),
        ({"memory_available": 100 * MIB}, "memory"),
        ({"disk_promised": 63 * GIB}, "disk"),
        ({"disk_free": 10 * MIB}, "disk"),
        ({"pids_free": 10}, "pids"),
        ({"files_free": 65_535}, "files"),
    ],
)
def test_refusal_names_the_resource(change: dict[str, int], resource: str) -> None:
    with pytest.raises(AdmissionRefused, match=resource) as refused:
        admit(msgspec.structs.replace(ROOM, **change), Limits())
    assert refused.value.field == f"limits.{resource}"
    assert refused.value.retry and refused.value.hint


@pytest.mark.parametrize("resource", ["memory", "disk"])
def test_what_never_fits_is_no_reason_to_try_again(resource: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        admit(ROOM, msgspec.structs.replace(Limits(), **{resource: 1 << 50}))
    assert refused.value.field == f"limits.{resource}" and not refused.value.retry and refused.value.hint


def test_the_last_one_fits_exactly() -> None:
    full = msgspec.structs.replace(ROOM, memory_promised=ROOM.memory - Limits().memory, sandboxes=9)
    admit(full, Limits())
    with pytest.raises(AdmissionRefused):
        admit(full, Limits(memory=Limits().memory + 1))
