"""Random stacks of layers that an import takes: files, links, removals, directories in place of files and the reverse."""

from __future__ import annotations

import tarfile

from hypothesis import strategies as st

from tests.images import EPOCH, Member, file, folder, hardlink, symlink

_PATHS = st.tuples(st.lists(st.sampled_from("abc"), max_size=2), st.sampled_from("xyxyxyabc")).map(
    lambda path: "/".join((*path[0], path[1]))
)
START = [
    *(folder(name) for name in ("a", "b", "a/b", "c")),
    *(file(f"{place}/x", place.encode()) for place in ("a", "a/b", "b", "c")),
    hardlink("a/y", "a/x"),
    hardlink("b/y", "a/x"),
    symlink("x", "a/b"),
]
_KINDS = ("file", "file", "file", "folder", "symlink", "hardlink", "fifo", "whiteout", "whiteout", "opaque")


@st.composite
def _member(draw: st.DrawFn) -> Member:
    path, kind = draw(_PATHS), draw(st.sampled_from(_KINDS))
    mtime, mode, uid = EPOCH + draw(st.integers(0, 2)), draw(st.sampled_from([0o644, 0o4755])), draw(st.integers(0, 2))
    above, slash, name = path.rpartition("/")
    if kind == "whiteout":
        return file(f"{above}{slash}.wh.{name}")
    if kind == "opaque":
        return file(f"{path}/.wh..wh..opq")
    if kind == "folder":
        return folder(path, mode | 0o111, uid=uid, mtime=mtime)
    if kind == "symlink":
        return symlink(path, draw(st.sampled_from(["x", "/a", "../nowhere"])))
    if kind == "hardlink":
        return hardlink(path, draw(st.sampled_from(["a/x", "b/x", "a/b/x", "c/x"])))
    if kind == "fifo":
        return file(path, type=tarfile.FIFOTYPE, uid=uid)
    xattrs = draw(st.sampled_from([{}, {}, {"user.one": b"\0\xff"}]))
    return file(path, draw(st.binary(max_size=3)), mode=mode, uid=uid, mtime=mtime, xattrs=xattrs)


def histories(most: int = 4) -> st.SearchStrategy[list[list[Member]]]:
    """Layers, bottom first. The import may refuse one: `Site.accepted`."""
    layers = st.lists(st.lists(_member(), max_size=7), min_size=1, max_size=most)
    return layers.map(lambda found: [START, *found])
