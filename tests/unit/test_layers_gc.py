"""What nothing reaches goes after a while, and nothing that somebody may still be about to use."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from barchan.errors import EnvironmentNotFound
from barchan.layers import content
from barchan.layers.gc import GRACE, collect, plan
from barchan.layers.store import LayerStore, StackFile

START = 1_700_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "layers")


def add(store: LayerStore, name: str, text: bytes) -> str:
    with store.temporary() as work:
        layer = work / "layer"
        layer.mkdir()
        (layer / "image").touch()
        (layer / "data").write_bytes(text)
        content.finish(layer, "split")
        return store.add(layer, name).digest


def digests(store: LayerStore) -> set[str]:
    return set(store.sizes())


def test_a_layer_goes_when_it_was_unused_for_long_enough(store: LayerStore) -> None:
    digest = add(store, "a", b"content")
    store.remove("a")
    first = collect(store, now=START)
    assert not first.removed and [layer.digest for layer in first.waiting] == [digest]
    assert not collect(store, now=START + GRACE - 1).removed and digests(store) == {digest}
    last = collect(store, now=START + GRACE)
    assert [layer.digest for layer in last.removed] == [digest] and last.freed == len(b"content") and not last.waiting
    assert not digests(store) and not list(store.unused.iterdir())


def test_layers_of_images_go_with_the_last_image(store: LayerStore) -> None:
    shared, own = add(store, "one", b"shared"), add(store, "two", b"own")
    store.add_stack({}, StackFile(layers=(shared, own)), "image", source="", kind="")
    for name in ("one", "two"):
        store.remove(name)
    collect(store, grace=0, now=START)
    assert digests(store) == {shared, own}
    store.remove("image")
    assert {layer.digest for layer in collect(store, grace=0, now=START).removed} == {shared, own}
    assert not list((store.root / "stacks").iterdir())


def test_a_dry_run_changes_nothing(store: LayerStore) -> None:
    digest = add(store, "a", b"content")
    store.remove("a")
    told = collect(store, grace=0, dry_run=True, now=START)
    assert [layer.digest for layer in told.removed] == [digest] and told.freed == 7
    assert digests(store) == {digest} and not list(store.unused.iterdir())


def test_a_clock_that_is_set_back_protects_nothing_for_ever() -> None:
    assert plan({"d"}, (), {"d": START + 9999}, START, GRACE).remove == {"d"}


def test_a_name_that_cannot_be_read_stops_it(store: LayerStore) -> None:
    add(store, "a", b"content")
    (store.root / "names/a/1.json").write_text("{")
    with pytest.raises(Exception, match="cannot be read"):
        collect(store, grace=0, now=START)
    assert len(digests(store)) == 1


class Users(RuleBasedStateMachine):
    """People name and forget layers and resolve names to use them, while collections run at any time."""

    names = st.sampled_from(["a", "b", "c"])
    contents = st.sampled_from([b"1", b"2", b"3"])

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.store = LayerStore(self.directory / "layers")
        self.now = START
        self.resolved: dict[str, float] = {}
        """When a layer was last resolved by somebody who may be about to mount it."""

    @rule(name=names, content=contents)
    def name(self, name: str, content: bytes) -> None:
        add(self.store, name, content)

    @rule(name=names)
    def forget(self, name: str) -> None:
        try:
            self.store.remove(name)
        except EnvironmentNotFound:
            pass

    @rule(name=names)
    def resolve(self, name: str) -> None:
        try:
            self.resolved[self.store.resolve(name).digest] = self.now
        except EnvironmentNotFound:
            pass

    @rule(seconds=st.sampled_from([1.0, GRACE / 2, GRACE * 2]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def collect(self) -> None:
        collect(self.store, now=self.now)

    @precondition(lambda self: self.resolved)
    @invariant()
    def what_was_resolved_just_now_is_there(self) -> None:
        recent = {digest for digest, at in self.resolved.items() if self.now - at < GRACE}
        assert recent <= digests(self.store)

    @invariant()
    def what_has_a_name_is_there(self) -> None:
        assert {entry.digest for entry in self.store.catalog.entries()} <= digests(self.store)

    def teardown(self) -> None:
        shutil.rmtree(self.directory)


TestUsers = Users.TestCase
TestUsers.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
