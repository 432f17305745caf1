"""`barchan layer collapse`: fewer layers, the same tree, and nothing done twice."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from barchan.errors import InvalidRequest
from barchan.images import ImageConfig
from barchan.layers.collapse import collapse, groups
from barchan.layers.gc import collect
from barchan.layers.merge import Merge
from barchan.layers.store import StackFile
from tests import trees
from tests.host.layer_site import Site, opened
from tests.host.layer_strategies import histories
from tests.images import Member, file, folder

SMALL = 64 << 10
BIG = os.urandom(SMALL)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with opened() as found:
        yield found


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[Merge]:
    found: list[Merge] = []
    real = Merge.run
    monkeypatch.setattr(Merge, "run", lambda self: [found.append(self), real(self)][1])
    return found


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 1], [range(2)]),
        ([9, 1, 1, 1, 9, 1, 9, 1, 1], [range(1, 4), range(7, 9)]),
        ([9, 9], []),
        ([10, 10, 9], []),
    ],
)
def test_runs_of_small_layers(sizes: list[int], expected: list[range]) -> None:
    assert groups(sizes, 9) == expected


def test_command(site: Site) -> None:
    name = site.fresh("command")
    config = {"config": {"Env": ["A=1"], "User": "nobody", "Entrypoint": ["/x"], "Labels": {"l": "1"}}}
    site.image(name, [[file("a", b"1")], [file("a", b"2")], [file("b", b"3")]], config=config)
    before = site.store.resolve(name)
    told = json.loads(site.run("collapse", name, "--json").stdout)
    after = site.store.resolve(name)
    assert (told["name"], told["version"], told["before"], told["after"]) == (name, 2, 3, 1)
    assert after.config == before.config != ImageConfig()
    again = site.run("collapse", name).stdout.decode()
    assert again.startswith(f"{name}@2 ") and again.endswith("1 -> 1 layers\n"), "nothing is left to merge"
    site.run("collapse", f"{name}@1", "named-anew")
    assert site.store.catalog.entry("named-anew", 1).digest == told["digest"]


LAYERS: list[list[Member]] = [
    [
        folder("d"),
        file("d/below", b"1"),
        file("d/kept", b"k"),
        folder("o"),
        file("o/below", b"2"),
        file("o/again", b"2"),
        file("big", BIG),
    ],
    [
        folder("o"),
        file("o/.wh..wh..opq"),
        file("o/again", b"3"),
        file("d/inside", b"3"),
        folder("n"),
        file("n/inside", b"4"),
        file("t", b"file"),
    ],
    [
        file("d/.wh.below"),
        file("d/.wh.inside"),
        file("o/.wh.again"),
        file("o/new", b"5"),
        file("n/.wh..wh..opq"),
        file("n/new", b"6"),
        folder("t"),
        file("t/in", b"7"),
    ],
    [file("last", BIG)],
]


def test_what_hides_something_below_stays_and_nothing_else(site: Site) -> None:
    name = site.fresh("marks")
    site.image(name, LAYERS)
    done = collapse(site.store, name, below=SMALL)
    assert (done.before, done.after) == (4, 3)
    assert not trees.differences(site.seen(f"{name}@2"), site.seen(f"{name}@1"))
    lines = site.run("ls", name, "--layer", "2", "-R").stdout.decode().splitlines()
    assert [(line[0], line.split(" /")[-1]) for line in lines] == [
        ("d", "d"),
        ("w", "d/below"),
        ("d", "n"),
        ("-", "n/new"),
        ("d", "o (opaque)"),
        ("-", "o/new"),
        ("d", "t"),
        ("-", "t/in"),
    ]


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(history=histories(6), big=st.lists(st.booleans(), min_size=7, max_size=7))
def test_the_kernel_shows_the_same(site: Site, history: list[list[Member]], big: list[bool]) -> None:
    name = site.fresh("random")
    sizes = [[file(f"big-{at}", BIG)] if much else [] for at, much in enumerate(big)]
    site.accepted(name, [[*more, *layer] for layer, more in zip(history, sizes, strict=False)])
    done = collapse(site.store, name, below=SMALL)
    event(f"{done.before} -> {done.after} layers")
    assert not trees.differences(site.seen(f"{name}@{done.entry.version}"), site.seen(f"{name}@1"))


def test_twice_is_the_same_digest_and_one_merge(site: Site, merges: list[Merge]) -> None:
    names = [site.fresh("twice") for _ in range(4)]
    site.image("once", [[file("one", b"1")], [file("two", b"2")]])
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda name: collapse(site.store, "once", name), names))
    assert len({one.entry.digest for one in done}) == 1
    assert len(merges) == 1


def test_the_same_digest_without_a_memory_of_it(site: Site, merges: list[Merge]) -> None:
    site.image("forgotten", LAYERS)
    digests = set()
    for name in ("f-one", "f-two"):
        for record in site.store.converted.glob("*/*.json"):
            record.unlink()
        digests.add(collapse(site.store, "forgotten", name, below=SMALL).entry.digest)
    assert len(digests) == 1 and len(merges) == 2


def test_a_group_is_merged_again_only_where_it_means_something_else(site: Site, merges: list[Merge]) -> None:
    base = [file("gone", b"g"), file("big", BIG)]
    site.image("here", [base, [file("x", b"1"), file("base")], [file("y", b"2"), file(".wh.gone")]])
    group = site.store.layers_of(site.store.catalog.entry("here", 1).digest)[1:]
    assert collapse(site.store, "here", below=SMALL).after == 2
    for name, below, done in (("same", [*base, file("more", b"m")], 1), ("other", [file("big", BIG)], 2)):
        site.image(f"{name}-base", [below])
        bottom = site.store.resolve(f"{name}-base").digest
        site.store.add_stack({}, StackFile(layers=(bottom, *group)), name, source="", kind="test")
        collapse(site.store, name, below=SMALL)
        assert len(merges) == done, name
        marks = [line for line in site.run("ls", name, "--layer", "2").stdout.decode().splitlines() if line[0] == "w"]
        assert len(marks) == (name == "same")


def test_layers_that_nobody_needs_any_more_go(site: Site) -> None:
    name = site.fresh("gone")
    site.image(name, [[file("gone-1", b"1")], [file("gone-2", b"2")]])
    old = site.store.resolve(name)
    collapse(site.store, name)
    site.store.remove(f"{name}@1")
    collect(site.store, grace=0)
    assert old.digest not in site.store.sizes()
    with site.overlay(name) as root:
        assert (root / "gone-1").read_text() == "1"


def test_what_has_no_next_version_needs_a_name(site: Site) -> None:
    name = site.fresh("old")
    digest = site.image(name, [[file("x", b"old")], [file("y", b"y")]])
    site.image(name, [[file("x", b"new")]])
    for ref, reason in ((f"{name}@1", "not the newest"), (digest, "no next version")):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            collapse(site.store, ref)
        assert caught.value.field == "new"
        assert collapse(site.store, ref, site.fresh("given")).after == 1


def test_an_image_of_a_registry_is_still_that_image(site: Site) -> None:
    tag, manifest = "docker://docker.io/library/it:1", "sha256:" + "1" * 64
    site.image("source", [[file("x", b"r")], [file("y", b"r")]])
    layers = site.store.layers_of(site.store.catalog.entry("source", 1).digest)
    pinned = f"docker://docker.io/library/it@{manifest}"
    for name in (pinned, tag):
        site.store.add_stack({}, StackFile(layers=layers), name, source=tag, kind="registry", manifest=manifest)
    assert collapse(site.store, tag).after == 1
    assert not site.store.resolve(tag).below and not site.store.resolve(pinned).below
    assert site.store.resolve(tag).reference == pinned


def test_nothing_is_left_of_one_that_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.image("fails", [[file("x", b"f")], [file("y", b"f")]])
    before = sorted(path.name for path in site.store.root.rglob("*"))
    threads = threading.active_count()
    monkeypatch.setattr("barchan.layers.layer_tree.MOST_ENTRIES", 1)
    with pytest.raises(InvalidRequest, match="limit of 1 files"):
        collapse(site.store, "fails")
    after = sorted(path.name for path in site.store.root.rglob("*"))
    assert [name for name in after if name not in before and len(name) != 64] == []
    assert threading.active_count() <= threads
