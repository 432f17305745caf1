"""What one member of a layer's tar says, checked: its place, its attributes. `InvalidRequest` names it. Pure."""

from __future__ import annotations

import stat
import tarfile

from barchan.errors import InvalidRequest
from barchan.layers.lower import Attributes, Parts
from barchan.layers.tarwalk import MOST_NAME, attributes_of, time_of

HIGHEST_ID = 65534
WHITEOUT, OPAQUE_FILE = b".wh.", b".wh..wh..opq"
_IGNORED = ("security.selinux", "system.nfs4_acl")
"""Labels of the machine where the image was made; umoci leaves them out too."""
_ALLOWED = ("user.", "security.capability", "system.posix_acl_")


def parts_of(name: str, member: tarfile.TarInfo) -> Parts:
    """Of a name, absolute or not: both are meant from the root of the image."""
    raw = name.encode("utf-8", "surrogateescape")
    parts = tuple(part for part in raw.split(b"/") if part not in (b"", b"."))
    if b"\0" in raw or len(raw) > MOST_NAME:
        raise refused(member, "has a name that no file can have")
    if b".." in parts:
        raise refused(member, "has '..' in its name")
    if any(part.startswith(WHITEOUT) for part in parts[:-1]):
        raise refused(member, "lies below a whiteout")
    return parts


def attributes(member: tarfile.TarInfo) -> Attributes:
    if not (0 <= member.uid <= HIGHEST_ID and 0 <= member.gid <= HIGHEST_ID):
        raise refused(member, f"belongs to {member.uid}:{member.gid}; a layer holds ids up to {HIGHEST_ID}")
    xattrs = {key: value for key, value in attributes_of(member).items() if key not in _IGNORED}
    for key in xattrs:
        if not key.startswith(_ALLOWED):
            raise refused(member, f"has the attribute {key!r}, which a layer may not carry")
    return Attributes(stat.S_IMODE(member.mode), member.uid, member.gid, time_ns(member), xattrs)


def time_ns(member: tarfile.TarInfo) -> int:
    try:
        return time_of(member)
    except ValueError as error:
        raise refused(member, f"has a modification time that {error}") from error


def refused(member: tarfile.TarInfo, reason: str) -> InvalidRequest:
    return InvalidRequest(f"tar member {member.name!r} {reason}", field="source", phase="convert")
