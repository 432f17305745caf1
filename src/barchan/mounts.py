"""Host directories that sandboxes may read: the administrator names them, a caller chooses among the names."""

from __future__ import annotations

import msgspec

from barchan.errors import InvalidRequest
from barchan.names import check_name

MOST_MOUNTS = 16
MOST_TARGET = 1024
"""Bytes of one target."""
_TAKEN = ("proc", "sys", "dev")


class DataMount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A directory of the node, read-only in the sandbox. What any user of the host may read there, the sandbox may read."""

    source: str
    """Name that the administrator of the node gave it: `barchan up --data-mount NAME=/path`."""
    target: str
    """Where it appears in the sandbox, absolute. Made where it is missing; what the image has there is hidden."""
    noexec: bool = False
    """Refuse to run programs from it."""


def check_mounts(mounts: tuple[DataMount, ...]) -> None:
    """Refuse what the types let through. Whether the names exist only a node knows."""
    if len(mounts) > MOST_MOUNTS:
        raise InvalidRequest(f"mounts: at most {MOST_MOUNTS}", field="mounts")
    parts = [_parts(mount) for mount in mounts]
    for i, one in enumerate(parts):
        for other in parts[:i]:
            if one[: len(other)] == other or other[: len(one)] == one:
                raise InvalidRequest(
                    f"mounts: {mounts[i].target} lies at or in another target", field="mounts", hint="keep them apart"
                )


def _parts(mount: DataMount) -> list[str]:
    check_name(mount.source, "mounts.source")
    parts, size = mount.target.split("/")[1:], len(mount.target.encode())
    if not mount.target.startswith("/") or "\0" in mount.target or any(part in ("", ".", "..") for part in parts):
        raise _refused(mount, "absolute, without '.', '..' and empty parts, and not the root")
    if size > MOST_TARGET or parts[0] in _TAKEN:
        raise _refused(mount, f"at most {MOST_TARGET} bytes, and not below /proc, /sys or /dev")
    return parts


def _refused(mount: DataMount, hint: str) -> InvalidRequest:
    return InvalidRequest(f"mounts: {mount.target[:80]!r} cannot be a target", field="mounts.target", hint=hint)
