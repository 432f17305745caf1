from __future__ import annotations

from pathlib import Path

import pytest

from barchan.errors import EnvironmentNotFound, InvalidRequest
from barchan.layers.stack import MOST, compose
from barchan.layers.store import Layer
from barchan.spec import EnvironmentRef


def resolve(ref: str) -> Layer:
    """Each name is its own layer; `alias` is another name of `base`."""
    digest = "base" if ref == "alias" else ref
    return Layer(f"sha256:{digest}", Path(digest), 1)


def test_top_comes_first() -> None:
    environment = EnvironmentRef(base="base", workspace="work", toolkits=("t1", "t2"))
    assert [layer.path.name for layer in compose(environment, resolve).layers] == ["t2", "t1", "work", "base"]


def test_base_alone() -> None:
    assert [layer.path.name for layer in compose(EnvironmentRef(base="base"), resolve).layers] == ["base"]


def test_same_layer_twice_is_refused_under_any_name() -> None:
    with pytest.raises(InvalidRequest, match="alias and base are the same layer"):
        compose(EnvironmentRef(base="base", toolkits=("alias",)), resolve)


@pytest.mark.parametrize(("toolkits", "ok"), [(MOST - 1, True), (MOST, False)])
def test_number_of_layers_is_bounded(toolkits: int, ok: bool) -> None:
    environment = EnvironmentRef(base="base", toolkits=tuple(f"t{i}" for i in range(toolkits)))
    if ok:
        assert len(compose(environment, resolve).layers) == MOST
        return
    with pytest.raises(InvalidRequest, match="at most 100"):
        compose(environment, resolve)


def test_what_the_resolver_raises_passes_through() -> None:
    def missing(ref: str) -> Layer:
        raise EnvironmentNotFound(ref)

    with pytest.raises(EnvironmentNotFound):
        compose(EnvironmentRef(base="base"), missing)
