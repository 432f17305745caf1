"""What overlayfs wrote of one file into the upper directory of a sandbox: the file, and marks that only it understands.

Programs in a sandbox cannot set the marks: `trusted.` attributes need a capability of the host, and overlayfs hides its own.
They are read with suspicion all the same: a path in one is taken apart and looked up without links.
"""

from __future__ import annotations

import os
import stat

import msgspec

from barchan.layers.lower import OPAQUE, Attributes, Parts

REDIRECT, METACOPY = "trusted.overlay.redirect", "trusted.overlay.metacopy"
_KEPT = ("user.", "security.capability", "system.posix_acl_")
"""As of the layers of images (`member`). The rest are overlayfs's own marks and labels of this host."""


class Entry(msgspec.Struct, frozen=True):
    """`redirect`: where in the layers below the rest of it is, when that is not its own path; "" otherwise.
    `metacopy`: the content is below, only the attributes are here."""

    state: os.stat_result
    attributes: Attributes
    opaque: bool = False
    redirect: bytes = b""
    metacopy: bool = False

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.state.st_mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.state.st_mode)


def read(name: bytes, directory: int) -> Entry:
    """Of the file `name`, a link itself, in an open directory."""
    state = os.stat(name, dir_fd=directory, follow_symlinks=False)
    place = b"/proc/self/fd/%d/" % directory + name
    keys = os.listxattr(place, follow_symlinks=False)
    marks = {key: os.getxattr(place, key, follow_symlinks=False) for key in keys if key in (OPAQUE, REDIRECT)}
    xattrs = {key: os.getxattr(place, key, follow_symlinks=False) for key in sorted(keys) if key.startswith(_KEPT)}
    return Entry(
        state,
        Attributes(stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid, state.st_mtime_ns, xattrs),
        marks.get(OPAQUE) == b"y",
        marks.get(REDIRECT, b""),
        METACOPY in keys,
    )


def kept(attributes: Attributes) -> Attributes:
    """Those of a file of a layer below, without what no layer is given."""
    xattrs = {key: value for key, value in attributes.xattrs.items() if key.startswith(_KEPT)}
    return msgspec.structs.replace(attributes, xattrs=xattrs)


def origin(redirect: bytes, beside: Parts | None) -> Parts | None:
    """The path in the layers below that a redirect means: absolute, or a name in the directory `beside`. None: no path."""
    parts = tuple(redirect.split(b"/"))
    parts, beside = (parts[1:], ()) if redirect.startswith(b"/") else (parts, beside if len(parts) == 1 else None)
    if beside is None or any(part in (b"", b".", b"..") for part in parts):
        return None
    return (*beside, *parts)
