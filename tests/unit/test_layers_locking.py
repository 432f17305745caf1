"""Lock files: the same layers again, here or elsewhere, or an error that says what is missing or different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan.errors import EnvironmentNotFound, InvalidRequest, LayerCorrupt, LockMismatch
from barchan.images import ImageConfig
from barchan.layers.locking import lock
from barchan.layers.pointers import set_alias, set_tag
from barchan.layers.resolved import ResolvedNames
from barchan.layers.stack import compose
from barchan.layers.store import LayerStore, StackFile
from barchan.locks import EnvironmentLock, read_lock
from barchan.spec import EnvironmentRef
from tests.unit.test_layers_store import add

CONFIG = ImageConfig(env={"PATH": "/opt/bin", "A": "1"}, user="agent", command=("sh",))


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    store = LayerStore(tmp_path / "layers")
    filled(store)
    return store


def filled(store: LayerStore) -> None:
    add(store, "work", b"work")
    add(store, "tool", b"tool")
    below, top = add(store, "below", b"below"), add(store, "top", b"top")
    store.add_stack({}, StackFile(layers=(below.digest, top.digest), config=CONFIG), "image", source="", kind="")


def whole(store: LayerStore) -> EnvironmentLock:
    return lock(store, EnvironmentRef(base="image", workspace="work", toolkits=("tool",)))


def layers(store: LayerStore, environment: EnvironmentRef) -> list[str]:
    return [layer.digest for layer in compose(environment, store.resolve).layers]


def test_a_lock_is_the_environment_as_it_was(store: LayerStore) -> None:
    set_tag(store, "tool", "stable")
    set_alias(store, "base", "image")
    asked = EnvironmentRef(base="base", workspace="work", toolkits=("tool:stable",))
    made, before = lock(store, asked), layers(store, asked)
    assert (made.base.name, made.base.reference, len(made.base.layers)) == ("base", "image@1", 2)
    assert made.toolkits[0].reference == "tool@1" and made.base.config == CONFIG
    for name in ("image", "work", "tool"):
        add(store, name, b"newer " + name.encode())
    set_tag(store, "tool@2", "stable")
    assert layers(store, asked) != before
    assert layers(store, read_lock(str(made)).environment) == before
    composed = compose(made.environment, store.resolve)
    assert composed.config == CONFIG and composed.environment.names() == ("image@1", "work@1", "tool@1")


def test_the_text_is_the_same_for_the_same_content(store: LayerStore, tmp_path: Path) -> None:
    other = LayerStore(tmp_path / "other")
    filled(other)
    assert str(whole(store)) == str(whole(other)) == str(read_lock(str(whole(store))))
    assert list(json.loads(str(whole(store)))) == ["barchan_lock", "base", "workspace", "toolkits"]
    assert str(whole(store)).endswith("}\n") and '\n    "reference": "image@1"' in str(whole(store))


def test_a_host_that_has_the_content_under_other_names(store: LayerStore, tmp_path: Path) -> None:
    made, other = whole(store), LayerStore(tmp_path / "other")
    add(other, "tool", b"another tool")
    with pytest.raises(EnvironmentNotFound, match="image@1 is not here: sha256:"):
        layers(other, made.environment)
    below, top = add(other, "b", b"below"), add(other, "t", b"top")
    other.add_stack({}, StackFile(layers=(below.digest, top.digest), config=CONFIG), "i", source="", kind="")
    add(other, "w", b"work")
    with pytest.raises(LockMismatch, match="tool@1 is not what was locked") as caught:
        layers(other, made.environment)
    assert made.toolkits[0].digest in str(caught.value) and caught.value.field == "environment.locked"
    tool = add(other, "toolkit", b"tool")
    composed = compose(made.environment, other.resolve)
    assert [layer.digest for layer in composed.layers] == layers(store, made.environment)
    assert composed.environment.toolkits == (tool.digest,), "a name that means something else here is not shown"


def test_a_lock_says_what_cannot_be_composed(store: LayerStore) -> None:
    with pytest.raises(EnvironmentNotFound, match="nothing"):
        lock(store, EnvironmentRef(base="image", toolkits=("nothing",)))
    with pytest.raises(InvalidRequest, match="the same layer"):
        lock(store, EnvironmentRef(base="tool", toolkits=("tool@1",)))


def test_layers_that_were_edited_are_refused(store: LayerStore) -> None:
    document = json.loads(str(whole(store)))
    document["base"]["layers"][0] = "sha256:" + "0" * 64
    with pytest.raises(LockMismatch, match="has no layer sha256:0000"):
        layers(store, read_lock(json.dumps(document)).environment)


def test_an_image_that_changed_on_the_disk_is_named(store: LayerStore) -> None:
    made = whole(store)
    document = store.root / "stacks" / f"{made.base.digest.removeprefix('sha256:')}.json"
    stack = msgspec.json.decode(document.read_bytes(), type=StackFile)
    document.write_bytes(msgspec.json.encode(StackFile(layers=stack.layers[::-1], config=stack.config)))
    with pytest.raises(LayerCorrupt, match=made.base.digest):
        layers(store, made.environment)


def edited(store: LayerStore, path: str, value: Any) -> str:
    document: Any = json.loads(str(whole(store)))
    *parents, last = path.split(".")
    place = document
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("barchan_lock", 2, "Invalid enum value 2"),
        ("extra", 1, "unknown field `extra`"),
        ("base.extra", 1, "unknown field `extra`"),
        ("base.config.extra", 1, "unknown field `extra`"),
        ("base.digest", "sha256:abc", "'sha256:abc' is no digest"),
        ("toolkits.0.layers", [], "tool@1 has 0 layers"),
        ("toolkits.0.layers", ["../x"], "'../x' is no digest"),
        ("base.reference", "A B", "'A B' is not an environment reference"),
        ("base.config", {"workdir": "relative"}, "must be absolute"),
    ],
)
def test_a_lock_is_read_strictly(store: LayerStore, path: str, value: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match="(?s)^lock: .*" + why.replace("(", r"\(")) as caught:
        read_lock(edited(store, path, value))
    assert caught.value.field == "lock"


@pytest.mark.parametrize("text", ["", "{}", "[]", "\0", b"\xff\xfe", "[" * 100_000, '{"barchan_lock": 1}'])
def test_what_is_no_lock_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_lock(text)
    assert caught.value.field == "lock"


def test_a_thousand_environments_and_one_new_toolkit(store: LayerStore) -> None:
    """Upgrading a toolkit makes one layer, whoever uses it: names see the new one, locks and tags that stay keep the old one."""
    tasks = 1000
    for number in range(tasks):
        add(store, f"task-{number}", b"task %d" % number)
    set_tag(store, "tool@1", "stable")
    set_alias(store, "tools", "tool")

    def environment(number: int) -> EnvironmentRef:
        return EnvironmentRef(base="image", workspace=f"task-{number}", toolkits=(("tool", "tools")[number % 2],))

    resolve = ResolvedNames(store)
    old = store.resolve("tool").digest
    locks = [lock(store, environment(number)) for number in range(tasks)]
    before = set(store.sizes())
    new = add(store, "tool", b"tool, upgraded").digest
    assert set(store.sizes()) - before == {new}, "one layer"
    composed = [compose(environment(number), resolve).layers for number in range(tasks)]
    assert all(layers[0].digest == new for layers in composed)
    locked = [compose(made.environment, resolve).layers for made in locks]
    assert all(layers[0].digest == old for layers in locked)
    assert [layers[1:] for layers in composed] == [layers[1:] for layers in locked], "all else is as it was"
    assert store.resolve("tool:stable").digest == old
    assert set(store.sizes()) - before == {new}
