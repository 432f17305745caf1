"""`barchan layer diff`: every difference that a program could see, and no other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barchan.layers import lower
from barchan.layers.compare import Side, compare
from barchan.layers.view import View, stack_of
from barchan.layers.view import opened as opened_layers
from tests.host.layer_site import CAPABILITY, Site, opened
from tests.host.layer_strategies import histories
from tests.images import EPOCH, Member, file, folder, symlink

BASE = [
    folder("./"),
    folder("same"),
    *(file(f"same/{number}", b"s" * number) for number in range(20)),
    folder("d", 0o750, uid=3),
    file("d/content", b"old content"),
    file("d/size", b"old"),
    file("d/mode", b"m"),
    file("d/owner", b"o", uid=1),
    file("d/xattrs", b"x", xattrs={"user.one": b"1"}),
    file("d/capability", b"x", xattrs={"security.capability": CAPABILITY}),
    file("d/time", b"t"),
    file("d/gone", b"g"),
    file("d/rewritten", b"the same"),
    symlink("d/link", "one"),
    file("d/type", b"file"),
    folder("d/tree"),
    file("d/tree/in", b"in"),
]
TOP = [
    file("d/content", b"new content"),
    file("d/size", b"newer"),
    file("d/mode", b"m", mode=0o600),
    file("d/owner", b"o", uid=2),
    file("d/xattrs", b"x", xattrs={"user.one": b"2"}),
    file("d/capability", b"x"),
    file("d/time", b"t", mtime=EPOCH + 1),
    file("d/.wh.gone"),
    file("d/rewritten", b"the same"),
    symlink("d/link", "two"),
    folder("d/type"),
    file("d/type/in", b"in"),
    file("d/tree", b"file"),
    folder("new"),
    file("new/\x1b[2J", b"n"),
]
EXPECTED = """\
M /d/capability
M /d/content
D /d/gone
M /d/link
M /d/mode
M /d/owner
M /d/size
T /d/tree
D /d/tree/in
T /d/type
A /d/type/in
M /d/xattrs
A /new
A /new/\\x1b[2J
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with opened() as found:
        found.image("old", [BASE])
        found.image("new", [BASE, TOP])
        yield found


def test_each_kind_of_change(site: Site) -> None:
    assert site.run("diff", "old", "new").stdout.decode() == EXPECTED
    told = [json.loads(line) for line in site.run("diff", "old", "new", "--json").stdout.splitlines()]
    what = {entry["path"]: entry["changed"] for entry in told if entry["status"] == "M"}
    for name in ("content", "mode", "owner", "xattrs"):
        assert what[f"/d/{name}"] == [name]
    assert what["/d/size"] == ["content"] and what["/d/capability"] == ["xattrs"]


def test_times_when_they_are_asked_for(site: Site) -> None:
    more = set(site.run("diff", "old", "new", "--times").stdout.decode().splitlines()) - set(EXPECTED.splitlines())
    assert more == {"M /d/time"}


def test_nothing_is_different_from_itself(site: Site) -> None:
    for ref in ("old", "new"):
        assert site.run("diff", ref, ref, "--times").stdout == b""


def test_layers_alone_are_compared_with_what_they_remove(site: Site) -> None:
    site.image("other", [BASE, [folder("d", 0o750, uid=3), file("d/.wh..wh..opq"), file("d/gone", b"g")]])
    one, two = site.store.resolve("new").digest, site.store.resolve("other").digest
    told = [json.loads(line) for line in site.run("diff", one, two, "--json").stdout.splitlines()]
    found = {entry["path"]: (entry["status"], entry["changed"]) for entry in told}
    assert found["/d"] == ("M", ["opaque"])
    assert found["/d/gone"] == ("T", [])
    assert found["/d/content"][0] == "D"


def test_what_is_shared_is_neither_listed_nor_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []
    real = lower.open_directory
    monkeypatch.setattr(
        "barchan.layers.view.open_directory", lambda fd, path: [looked.append(b"/".join(path)), real(fd, path)][1]
    )
    changes = _changes(site, "old", "new")
    assert len(changes) == len(EXPECTED.splitlines())
    assert b"d" in looked and b"same" not in looked


def _changes(site: Site, old: str, new: str, *, times: bool = False) -> list[tuple[str, bytes]]:
    one, two = stack_of(site.store.resolve(old)), stack_of(site.store.resolve(new))
    with opened_layers(site.store, one) as before, opened_layers(site.store, two) as after:
        sides = Side(View(before), [x.digest for x in one]), Side(View(after), [x.digest for x in two])
        return [(change.status, b"/".join(change.path)) for change in compare(*sides, times=times)]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(one=histories(), two=histories(), shared=st.integers(0, 3))
def test_it_finds_what_the_kernel_shows(
    site: Site, one: list[list[Member]], two: list[list[Member]], shared: int
) -> None:
    """The control is a comparison of the mounted trees. Names of hard links do not count."""
    names = site.fresh("one"), site.fresh("two")
    for name, history in zip(names, (one, [*one[:shared], *two]), strict=True):
        site.accepted(name, history)
    before, after = (site.seen(name) for name in names)
    expected = set()
    for path in before.keys() | after.keys():
        old, new = before.get(path), after.get(path)
        if old is None or new is None or _visible(old) != _visible(new):
            kind = "A" if old is None else "D" if new is None else "T" if _kind(old) != _kind(new) else "M"
            expected.add((kind, b"" if path == b"." else path))
    found = _changes(site, *names, times=True)
    assert set(found) == expected and len(found) == len(expected)
    assert [path.split(b"/") for _, path in found] == sorted(path.split(b"/") for _, path in found)


def _kind(entry: Sequence[object]) -> int:
    return int(str(entry[0]), 8) >> 12


def _visible(entry: Sequence[object]) -> tuple[object, ...]:
    return tuple(entry[:6])
