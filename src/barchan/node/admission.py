"""Whether this node takes one more sandbox: a pure decision over what is promised already."""

from __future__ import annotations

import msgspec

from barchan.errors import AdmissionRefused, InvalidRequest
from barchan.sizes import size
from barchan.spec import MIB, Limits


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has and what it has promised. Bytes."""

    sandboxes: int
    most_sandboxes: int
    memory: int
    """That may be promised in all."""
    memory_promised: int
    memory_available: int
    """Of the host, right now."""
    disk: int
    disk_promised: int
    disk_size: int
    disk_free: int
    """Of the scratch volume, right now."""
    pids_free: int
    """Of the host."""
    files_free: int
    """Open files that the host may still have."""


RESERVE = 256 * MIB
"""Memory and disk that stay free for the host and for what already runs."""

FILES_RESERVE = 65_536
"""Open files that stay for the host and for what already runs."""


def admit(room: Room, limits: Limits) -> None:
    """Raises `AdmissionRefused` naming the resource that is short, `InvalidRequest` when it never could be enough."""
    for resource, most in (("memory", room.memory), ("disk", room.disk)):
        if getattr(limits, resource) > most:
            raise InvalidRequest(
                f"limits.{resource}: more than this node has", field=f"limits.{resource}", hint=f"at most {size(most)}"
            )
    if room.sandboxes >= room.most_sandboxes:
        raise _refused("sandboxes", f"{room.sandboxes} of {room.most_sandboxes} in use")
    if room.memory_promised + limits.memory > room.memory:
        raise _refused("memory", f"{size(room.memory_promised)} of {size(room.memory)} promised")
    if room.memory_available < RESERVE:
        raise _refused("memory", f"only {size(room.memory_available)} available on the host")
    if room.disk_promised + limits.disk > room.disk:
        raise _refused("disk", f"{size(room.disk_promised)} of {size(room.disk)} promised")
    if room.disk_free < min(RESERVE, room.disk_size // 8):
        raise _refused("disk", f"only {size(room.disk_free)} free on the scratch volume")
    if room.pids_free < 64:
        raise _refused("pids", f"only {room.pids_free} process ids left on the host")
    if room.files_free < FILES_RESERVE:
        raise _refused("files", f"only {room.files_free} open files left on the host (fs.file-max)")


def _refused(resource: str, why: str) -> AdmissionRefused:
    return AdmissionRefused(
        f"no room for another sandbox: {resource} ({why})",
        field=f"limits.{resource}",
        hint="stop sandboxes, lower the limits or try again later",
    )
