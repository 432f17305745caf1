"""Placement decides from values alone."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from barchan.control.placement import able, choose, load, refused
from barchan.errors import InvalidRequest, NodeUnavailable, NotSupported
from barchan.mounts import DataMount
from barchan.spec import GIB, EnvironmentRef, Limits, NodeInfo, NodeName, SandboxSpec


def node(name: str, **values: object) -> NodeInfo:
    base: dict[str, object] = {
        "backends": ("container",),
        "kernel": "full",
        "sandboxes": 0,
        "capacity": 100,
        "memory_total": 64 * GIB,
        "memory_promised": 0,
        "disk_total": 100 * GIB,
        "disk_promised": 0,
    }
    return NodeInfo(name=NodeName(name), **(base | values))  # type: ignore[arg-type]


def spec(**values: object) -> SandboxSpec:
    return SandboxSpec(environment=EnvironmentRef(base="debian-12"), **values)  # type: ignore[arg-type]


def test_no_node_at_all() -> None:
    with pytest.raises(NodeUnavailable):
        able([], spec())


def test_no_node_with_that_backend() -> None:
    with pytest.raises(NotSupported) as caught:
        able([node("a")], spec(backend="vm"))
    assert caught.value.field == "backend"


def test_only_nodes_with_the_data_are_able() -> None:
    nodes = [node("a", data_mounts=("set", "more")), node("b", data_mounts=("set",)), node("c")]
    both = (DataMount(source="set", target="/s"), DataMount(source="more", target="/m"))
    assert [one.name for one in able(nodes, spec(mounts=both))] == ["a"]
    assert [one.name for one in able(nodes, spec(mounts=both[:1]))] == ["a", "b"]
    with pytest.raises(InvalidRequest) as caught:
        able(nodes, spec(mounts=(DataMount(source="none", target="/n"),)))
    assert caught.value.field == "mounts.source" and "a has set, more" in caught.value.hint


@pytest.mark.parametrize(
    ("limits", "word"),
    [(Limits(memory=65 * GIB), "memory"), (Limits(disk=101 * GIB), "disk"), (Limits(cpus=64, disk=GIB), "cpus")],
)
def test_a_sandbox_larger_than_every_node_is_a_wrong_request(limits: Limits, word: str) -> None:
    with pytest.raises(InvalidRequest, match=f"a: has .* {word}.*b: has") as caught:
        able([node("a", memory_total=GIB, disk_total=GIB, cpus_total=1), node("b", cpus_total=2)], spec(limits=limits))
    assert not caught.value.retry, "no later try can do better"
    assert caught.value.field == f"limits.{word}"
    most = {"memory": "64.0 GiB of memory", "disk": "100.0 GiB of disk", "cpus": "2 cpus"}[word]
    assert caught.value.hint == f"at most {most}, on one node"


def test_nodes_that_lack_different_things() -> None:
    nodes = [node("a", memory_total=GIB), node("b", disk_total=GIB)]
    with pytest.raises(InvalidRequest, match="a: has .* memory.*b: has .* disk") as caught:
        able(nodes, spec(limits=Limits(memory=2 * GIB, disk=2 * GIB)))
    assert (caught.value.field, caught.value.retry) == ("limits", False)
    assert "different nodes" in caught.value.hint


def test_only_able_nodes_are_left() -> None:
    nodes = [node("a"), node("b", backends=("vm",)), node("c", memory_total=GIB)]
    assert [n.name for n in able(nodes, spec(limits=Limits(memory=2 * GIB)))] == ["a"]


def test_load_is_that_of_the_fullest_resource() -> None:
    assert load(node("a", sandboxes=10, memory_promised=32 * GIB)) == 0.5
    assert load(node("a", sandboxes=10, disk_promised=200 * GIB)) == 2.0


def test_the_less_loaded_of_two_is_chosen() -> None:
    nodes = [node("a", sandboxes=50), node("b", sandboxes=10)]
    assert {choose(nodes, Random(seed)) for seed in range(20)} == {"b"}


def test_full_nodes_come_last_but_are_not_left_out() -> None:
    full = node("full", sandboxes=100)
    busy = node("busy", sandboxes=99, memory_promised=90 * GIB)
    assert choose([full, busy], Random(1)) == "busy"
    assert choose([full], Random(1)) == "full"


def test_many_creates_spread_evenly() -> None:
    """Even when the view is as old as the whole burst, no node gets a large multiple of its share."""
    nodes, random = [node(f"n{i}", sandboxes=i % 7) for i in range(40)], Random(7)
    count = Counter(choose(nodes, random) for _ in range(4000))
    assert max(count.values()) < 100 * 8
    fresh = {n.name: n for n in (node(f"n{i}") for i in range(40))}
    for _ in range(4000):
        name = choose(list(fresh.values()), random)
        fresh[name] = node(name, sandboxes=fresh[name].sandboxes + 1, capacity=1000)
    held = [n.sandboxes for n in fresh.values()]
    assert max(held) - min(held) <= 12


def test_a_refusal_says_what_every_node_said() -> None:
    error = refused({NodeName("b"): "no memory", NodeName("a"): "full"})
    assert "a: full; b: no memory" in error.message
