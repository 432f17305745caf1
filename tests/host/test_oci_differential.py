"""Random images: what a sandbox sees of them is what umoci unpacks. What one of the two refuses, the other refuses too.

Left out of the generated images, because they are refused here by name and umoci makes them: devices, `..` in names, attributes
that steer overlayfs, ids above 65534, and times after 2115 (`test_oci_import.py`). Names of 255 bytes depend on erofs-utils (`test_oci_umoci.py`).
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from barchan.errors import InvalidRequest
from tests.images import EPOCH, Member, file, folder, hardlink, symlink, tar
from tests.unpacked import Refused, compared, imported, place

EXAMPLES = int(os.environ.get("BARCHAN_DIFFERENTIAL_EXAMPLES", "40"))
"""About a third of a second each."""
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
KINDS = (
    "file",
    "file",
    "file",
    "folder",
    "folder",
    "symlink",
    "hardlink",
    "hardlink",
    "fifo",
    "whiteout",
    "whiteout",
    "opaque",
)
"""As often as it stands here."""
LONG = ("n" * 101, "ü" * 127)
"""Longer than a header of ustar holds."""
FOLDERS = st.lists(st.sampled_from("aabbc" + "d"), max_size=3)
LEAVES = st.sampled_from([*"xyxyxyabc", *LONG])
PATHS = st.tuples(FOLDERS, LEAVES).map(lambda path: "/".join((*path[0], path[1])))
TARGETS = st.one_of(PATHS, PATHS.map(lambda path: "/" + path), PATHS.map(lambda path: "../" + path))
MODES = st.sampled_from([0o644, 0o755, 0o700, 0, 0o4755, 0o2711, 0o6777, 0o1777])
OWNERS = st.sampled_from([0, 1, 1000, 65534])
TIMES = st.sampled_from([EPOCH, EPOCH, EPOCH + 0.5, EPOCH - 1234.125, 0, 1, EPOCH + 7.000001, (1 << 32) + 0.25])
ATTRIBUTES = st.dictionaries(
    st.sampled_from(["user.a", "user.b", "user." + "n" * 200]), st.binary(min_size=1, max_size=40), max_size=2
)
START = [
    *(folder(name) for name in ("a", "b", "a/b", "d")),
    file("a/x", b"ax", mode=0o4755, uid=7, xattrs={"user.note": b"kept", "security.capability": CAPABILITY}),
    hardlink("a/y", "a/x"),
    hardlink("b/x", "a/x"),
    file("x", b"x"),
    file("a/b/x", b"abx"),
    symlink("c", "a/b", uid=1000),
    symlink("b/c", "../a"),
    folder("d/a", 0o1777, xattrs={"user.d": b"d"}, mtime=EPOCH - 3),
]
"""The bottom layer of every image: most members of the layers above change something in it."""


class Content(bytes):
    def __repr__(self) -> str:
        return f"<{len(self)} bytes {bytes(self[:3])!r}>"


@st.composite
def members(draw: st.DrawFn) -> Member:
    path, kind = draw(PATHS), draw(st.sampled_from(KINDS))
    above, slash, name = path.rpartition("/")
    owned: dict[str, Any] = {"uid": draw(OWNERS), "gid": draw(OWNERS), "mtime": draw(TIMES)}
    if kind == "whiteout":
        return file(f"{above}{slash}.wh.{name}")
    if kind == "opaque":
        return file(f"{path}/.wh..wh..opq")
    if kind == "symlink":
        return symlink(path, draw(TARGETS), **owned)
    if kind == "hardlink":
        return hardlink(path, draw(PATHS), **owned)
    owned["mode"] = draw(MODES)
    if kind == "fifo":
        return file(path, type=tarfile.FIFOTYPE, **owned)
    owned["xattrs"] = draw(ATTRIBUTES)
    if kind == "folder":
        return folder(path, **owned)
    return file(path, Content(draw(st.binary(max_size=3)) * draw(st.sampled_from([1, 1, 5000]))), **owned)


HISTORIES = st.lists(st.lists(members(), max_size=7), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    with place() as path:
        yield path


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # to shrink takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(HISTORIES)
def test_random_histories_give_the_same_tree(data: Path, history: list[list[Member]]) -> None:
    """What umoci refuses (a file as a parent, a hard link to nothing) must be refused here too, and the reverse."""
    history = [START, *history]
    while True:
        layers = [tar(layer) for layer in history]
        try:
            found = compared(data, layers)
        except Refused as error:
            with pytest.raises(InvalidRequest) as caught:
                imported(data, layers)
            assert caught.value.phase == "convert", error
            history = without(history, caught.value.message)
        else:
            event(f"{sum(map(len, history)) // 5 * 5} members or a few more in {len(history)} layers are equal")
            assert not found, "\n".join(found)
            return


def without(history: list[list[Member]], message: str) -> list[list[Member]]:
    """The member that was refused, and others of its name, left out."""
    kept = [[one for one in layer if not message.startswith(f"tar member {one[0].name!r} ")] for layer in history]
    assert kept != history, message
    return kept
