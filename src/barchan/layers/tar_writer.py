"""A tar of what layers bring, as layers of OCI images are: removals are files with names of their own. The same layers, the same bytes.

Names, owners, modes, times to the nanosecond, hard links and extended attributes are kept. What tar has no way to say is left out and
counted: an attribute without a value, or with "=" in its name.
"""

from __future__ import annotations

import os
import stat
import tarfile
from decimal import Decimal
from typing import Protocol

from barchan.errors import InvalidRequest, LayerCorrupt
from barchan.layers import upper
from barchan.layers.layer_tree import shown
from barchan.layers.lower import Parts
from barchan.layers.member import OPAQUE_FILE, WHITEOUT
from barchan.layers.view import Entry, View

PHASE = "export"
_BLOCK = tarfile.BLOCKSIZE
_PIECE = 1 << 20
_TYPES = {stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE, stat.S_IFIFO: tarfile.FIFOTYPE}


class Sink(Protocol):
    def write(self, data: bytes, /) -> object: ...


class LayerTar:
    """One use. Raises `InvalidRequest` naming a file that would mean something else in an image, `LayerCorrupt`."""

    def __init__(self, out: Sink, view: View) -> None:
        self._out, self._view = out, view
        self._links: dict[tuple[int, int], Parts] = {}
        self.newest = 0
        """Time of the newest file, in ns since 1970."""
        self.left_out = 0
        """Attributes."""

    def run(self) -> None:
        root = self._view.root()
        assert root.folder is not None
        self._place(root)
        for entry in self._view.walk(root.folder):
            self._place(entry)
        self._out.write(bytes(2 * _BLOCK))

    def _place(self, entry: Entry) -> None:
        path, state = entry.path, entry.state
        if path and path[-1].startswith(WHITEOUT):
            raise _refused(path, "has a name that means a removal in an image")
        self.newest = max(self.newest, state.st_mtime_ns)
        if entry.whiteout:
            return self._removal((*path[:-1], WHITEOUT + path[-1]), state)
        info = self._described(entry)
        if stat.S_ISREG(state.st_mode) and info.type == tarfile.REGTYPE:
            info.size = state.st_size
            self._out.write(header(info))
            return self._content(entry)
        self._out.write(header(info))
        if self._view.whiteouts and entry.folder is not None and entry.folder.opaque:
            self._removal((*path, OPAQUE_FILE), state)

    def _removal(self, path: Parts, state: os.stat_result) -> None:
        info = tarfile.TarInfo(_text(path))
        info.mode = 0
        info.mtime, info.pax_headers = _time(state.st_mtime_ns)
        self._out.write(header(info))

    def _described(self, entry: Entry) -> tarfile.TarInfo:
        state, info = entry.state, tarfile.TarInfo(_text(entry.path) or ".")
        kind = stat.S_IFMT(state.st_mode)
        first = self._first(entry)
        if first is not None:
            info.type, info.linkname = tarfile.LNKTYPE, _text(first)
        elif kind in _TYPES:
            info.type = _TYPES[kind]
        elif kind != stat.S_IFREG:
            raise _refused(entry.path, "is a device or a socket")
        if kind == stat.S_IFLNK and first is None:
            info.linkname = os.fsdecode(self._view.target(entry))
        info.mode, info.uid, info.gid = stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid
        info.mtime, exact = _time(state.st_mtime_ns)
        info.pax_headers = exact if first else {**exact, **self._attributes(entry)}
        return info

    def _first(self, entry: Entry) -> Parts | None:
        """The name under which a file with several was written."""
        if entry.folder is not None or entry.state.st_nlink == 1:
            return None
        first = self._links.setdefault((entry.layer, entry.state.st_ino), entry.path)
        return None if first == entry.path else first

    def _attributes(self, entry: Entry) -> dict[str, str]:
        found = upper.kept(self._view.attributes(entry)).xattrs
        said = {key: value for key, value in found.items() if value and "=" not in key}
        self.left_out += len(found) - len(said)
        return {f"SCHILY.xattr.{key}": value.decode("utf-8", "surrogateescape") for key, value in said.items()}

    def _content(self, entry: Entry) -> None:
        left = entry.state.st_size
        try:
            with self._view.content(entry) as fd:
                while left:
                    piece = os.read(fd, min(left, _PIECE))
                    if not piece:
                        raise OSError("the file is shorter than it says")
                    left -= len(piece)
                    self._out.write(piece)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LayerCorrupt(f"{shown(entry.path)} cannot be read: {error}", phase=PHASE) from error
        self._out.write(padding(entry.state.st_size))


def header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


def _text(path: Parts) -> str:
    return b"/".join(path).decode("utf-8", "surrogateescape")


def _time(ns: int) -> tuple[int, dict[str, str]]:
    """Whole seconds, and what else is to be said."""
    seconds, rest = divmod(ns, 10**9)
    return seconds, {"mtime": format(Decimal(ns).scaleb(-9), "f").rstrip("0")} if rest else {}


def _refused(path: Parts, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{shown(path)} {reason}", field="environment", phase=PHASE)
