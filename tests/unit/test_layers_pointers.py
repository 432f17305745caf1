"""Tags and aliases: what they mean, who keeps what, and that nothing leads in circles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from barchan.errors import EnvironmentNotFound, InvalidRequest
from barchan.layers.catalog import MOST_ALIASES
from barchan.layers.gc import collect
from barchan.layers.pointers import names_of, set_alias, set_tag
from barchan.layers.pull import images_missing
from barchan.layers.resolved import SETTLED_NS, ResolvedNames
from barchan.layers.store import LayerStore, StackFile
from barchan.spec import EnvironmentRef
from tests.unit.test_layers_store import add


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers")


def test_a_tag_means_a_version_until_it_is_moved(store: LayerStore) -> None:
    first, second = add(store, "base", b"one"), add(store, "base", b"two")
    set_tag(store, "base@1", "stable")
    assert store.resolve("base:stable") == first and first.reference == "base@1"
    set_tag(store, "base", "stable")
    assert store.resolve("base:stable") == second
    set_tag(store, "base:stable", "next")
    assert store.catalog.tags("base") == {"next": 2, "stable": 2}


@pytest.mark.parametrize(("name", "tag"), [("base", "Stable"), ("base", "../x"), ("base", ""), ("sha256", "x")])
def test_a_tag_is_a_name(store: LayerStore, name: str, tag: str) -> None:
    add(store, name, b"one")
    with pytest.raises(InvalidRequest) as caught:
        set_tag(store, name, tag)
    assert caught.value.field == "tag"


def test_a_tag_is_of_something_that_is_here(store: LayerStore) -> None:
    with pytest.raises(EnvironmentNotFound):
        set_tag(store, "nothing", "stable")
    assert not list((store.root / "names").iterdir()), "nothing half-made"
    with pytest.raises(InvalidRequest, match="registry's"):
        set_tag(store, "docker://debian:12", "stable")


def test_an_unknown_tag_tells_those_that_there_are(store: LayerStore) -> None:
    add(store, "base", b"one")
    set_tag(store, "base", "stable")
    with pytest.raises(EnvironmentNotFound) as caught:
        store.resolve("base:stabel")
    assert caught.value.hint == "tags: stable"


def test_an_alias_stands_for_whatever_it_names(store: LayerStore) -> None:
    first = add(store, "base", b"one")
    set_alias(store, "newest", "base")
    second = add(store, "base", b"two")
    set_alias(store, "pinned", "base@1")
    set_alias(store, "content", first.digest)
    set_tag(store, "base", "stable")
    set_alias(store, "tagged", "base:stable")
    set_alias(store, "again", "pinned")
    assert store.resolve("newest") == store.resolve("tagged") == second
    assert store.resolve("pinned") == store.resolve("again") == first
    assert store.resolve("content").digest == first.digest
    assert names_of(store.catalog) == {
        "base@1": ("again", "pinned"),
        "base@2": ("base:stable", "newest", "tagged"),
        first.digest: ("content",),
    }
    set_alias(store, "pinned", "base@2")
    assert store.resolve("again") == second


def test_an_alias_may_be_of_an_image_that_is_not_here(store: LayerStore) -> None:
    set_alias(store, "python", "docker://python:3.12")
    assert images_missing(store, EnvironmentRef(base="python")) == ["docker://docker.io/library/python:3.12"]
    layer = add(store, "base", b"one")
    stack = StackFile(layers=(layer.digest,))
    store.add_stack({}, stack, "docker://docker.io/library/python:3.12", source="", kind="registry")
    assert images_missing(store, EnvironmentRef(base="python")) == []
    assert store.resolve("python").digest == layer.digest


def test_an_alias_is_a_whole_reference(store: LayerStore) -> None:
    add(store, "base", b"one")
    set_alias(store, "fast", "base")
    for reference in ("fast@1", "fast:stable"):
        with pytest.raises(EnvironmentNotFound) as caught:
            store.resolve(reference)
        assert "fast is an alias of base" in caught.value.hint


def test_aliases_never_lead_in_circles(store: LayerStore) -> None:
    add(store, "base", b"one")
    set_alias(store, "a", "base")
    set_alias(store, "b", "a")
    for target in ("a", "b"):
        with pytest.raises(InvalidRequest, match="stand for itself") as caught:
            set_alias(store, "a", target)
        assert caught.value.field == "target"
    assert store.resolve("b").name == "base"
    for number in range(MOST_ALIASES - 2):
        set_alias(store, f"b{number}", f"b{number - 1}" if number else "b")
    with pytest.raises(InvalidRequest, match="from alias to alias"):
        set_alias(store, "too-far", f"b{MOST_ALIASES - 3}")
        set_alias(store, "further", "too-far")


def test_a_name_is_either_an_alias_or_an_environment(store: LayerStore) -> None:
    add(store, "base", b"one")
    with pytest.raises(InvalidRequest, match="is an environment"):
        set_alias(store, "base", "base")
    set_alias(store, "fast", "base")
    with pytest.raises(InvalidRequest, match="fast is an alias of base"):
        add(store, "fast", b"two")
    with pytest.raises(EnvironmentNotFound):
        set_alias(store, "other", "nothing")
    assert store.catalog.aliases() == {"fast": "base"}


def test_what_a_tag_or_an_alias_means_is_not_removed(store: LayerStore) -> None:
    for content in (b"one", b"two"):
        add(store, "base", content)
    set_tag(store, "base@1", "stable")
    set_alias(store, "fast", "base@2")
    for reference, holder in (("base@1", "base:stable"), ("base@2", "fast"), ("base", "fast")):
        with pytest.raises(InvalidRequest, match=holder):
            store.remove(reference)
    assert set(store.catalog.versions("base")) == {1, 2}
    assert store.remove("base:stable") == () and store.remove("fast") == ()
    assert [entry.version for entry in store.remove("base@1")] == [1]
    set_tag(store, "base", "stable")
    store.remove("base")
    with pytest.raises(EnvironmentNotFound, match="no environment 'base'"):
        store.resolve("base:stable")


def test_a_tag_or_an_alias_that_is_not_there_is_not_removed(store: LayerStore) -> None:
    add(store, "base", b"one")
    for reference in ("base:stable", "fast"):
        with pytest.raises(EnvironmentNotFound):
            store.remove(reference)
    set_tag(store, "base", "stable")
    set_alias(store, "fast", "base:stable")
    with pytest.raises(InvalidRequest, match="fast"):
        store.remove("base:stable")


def test_gc_keeps_what_an_alias_of_a_digest_reaches(store: LayerStore) -> None:
    below, top = add(store, "below", b"below"), add(store, "top", b"top")
    image = store.add_stack({}, StackFile(layers=(below.digest, top.digest)), "image", source="", kind="")
    set_alias(store, "kept", image.digest)
    for name in ("below", "top", "image"):
        store.remove(name)
    assert not collect(store, grace=0).removed
    assert [layer.digest for layer in store.resolve("kept").below] == [below.digest]
    store.remove("kept")
    assert len(collect(store, grace=0).removed) == 2


def test_what_was_resolved_is_read_again_when_a_pointer_moves(store: LayerStore) -> None:
    first, second = add(store, "base", b"one"), add(store, "base", b"two")
    set_tag(store, "base@1", "stable")
    set_alias(store, "fast", "base:stable")
    resolve = ResolvedNames(store)
    for name in ("base", "fast"):
        past = store.catalog.changed(name) - 2 * SETTLED_NS
        os.utime(store.root / "names" / name, ns=(past, past))
    assert resolve("fast").digest == resolve("base:stable").digest == first.digest
    set_tag(store, "base@2", "stable")
    assert resolve("fast").digest == resolve("base:stable").digest == second.digest
    set_alias(store, "fast", "base@1")
    assert resolve("fast").digest == first.digest
