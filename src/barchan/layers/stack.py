"""Which layers a sandbox gets, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from barchan.errors import InvalidRequest
from barchan.images import ImageConfig, renamed, stacked
from barchan.layers.store import Layer
from barchan.spec import EnvironmentRef

MOST = 100
"""Layers of one sandbox. The kernel takes 500, a spawn request 120."""


class Composition(NamedTuple):
    """An environment as it is now."""

    environment: EnvironmentRef
    """Each name with its version, so that it stays the same whatever is imported later."""
    layers: tuple[Layer, ...]
    """Top first, as overlayfs wants them."""
    config: ImageConfig


def compose(environment: EnvironmentRef, resolve: Callable[[str], Layer]) -> Composition:
    """The layers of an environment: from the top the last toolkit … workspace, base.

    What `resolve` raises passes through. A name for what another name has brought already is refused. Images may share
    layers: of two equal ones only the upper one is kept, for it covers all that the lower one could show.
    """
    names = environment.names()
    _check_number(len(names))
    images = tuple(resolve(name) for name in names)
    seen: dict[tuple[str, ...], str] = {}
    for name, image in zip(names, images, strict=True):
        whole = tuple(layer.digest for layer in _layers(image))
        if whole in seen:
            raise InvalidRequest(
                f"environment: {name} and {seen[whole]} are the same layer",
                field="environment",
                hint="name each layer once",
            )
        seen[whole] = name
    layers = {layer.digest: layer for image in reversed(images) for layer in reversed(_layers(image))}
    _check_number(len(layers))
    pinned = renamed(environment, [image.reference for image in images])
    return Composition(pinned, tuple(layers.values()), stacked(image.config for image in images))


def _layers(image: Layer) -> tuple[Layer, ...]:
    """Bottom first."""
    return (*image.below, image)


def _check_number(layers: int) -> None:
    if layers > MOST:
        raise InvalidRequest(f"environment: {layers} layers, at most {MOST}", field="environment.toolkits")
