"""Which layers a sandbox gets, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Callable

from barchan.errors import InvalidRequest
from barchan.layers.store import Layer
from barchan.spec import EnvironmentRef

MOST = 100
"""Layers of one sandbox. The kernel takes 500, a spawn request 120."""


def compose(environment: EnvironmentRef, resolve: Callable[[str], Layer]) -> tuple[Layer, ...]:
    """The layers of an environment, top first as overlayfs wants them: the last toolkit … workspace, base.

    What `resolve` raises passes through. A layer that occurs twice is refused: overlayfs would not mount it.
    """
    names = environment.names()
    if len(names) > MOST:
        raise InvalidRequest(f"environment: {len(names)} layers, at most {MOST}", field="environment.toolkits")
    layers = tuple(resolve(name) for name in names)
    seen: dict[str, str] = {}
    for name, layer in zip(names, layers, strict=True):
        if layer.digest in seen:
            raise InvalidRequest(
                f"environment: {name} and {seen[layer.digest]} are the same layer",
                field="environment",
                hint="name each layer once",
            )
        seen[layer.digest] = name
    return layers[::-1]
