"""Which layers a sandbox gets, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from barchan.environments import EnvironmentRef, LockedLayers
from barchan.errors import EnvironmentNotFound, InvalidRequest, LockMismatch
from barchan.images import ImageConfig, renamed, stacked
from barchan.layers.store import Layer

_LOCKED = "environment.locked"
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

    What `resolve` raises passes through. Of a locked environment each name must be what the lock says, else `LockMismatch`, or
    `EnvironmentNotFound` when nothing of the name is here. A name for what another name has brought already is refused. Images may share
    layers: of two equal ones only the upper one is kept, for it covers all that the lower one could show.
    """
    names = environment.names()
    _check_number(len(names))
    if environment.locked:
        images = tuple(_as_locked(*one, resolve) for one in zip(names, environment.locked, strict=True))
    else:
        images = tuple(resolve(name) for name in names)
    seen: dict[tuple[str, ...], str] = {}
    for name, image in zip(names, images, strict=True):
        whole = _digests(image)
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


def _as_locked(name: str, locked: LockedLayers, resolve: Callable[[str], Layer]) -> Layer:
    """By its digest, whatever the name means here; by the name, if it is that, for people to read."""
    try:
        found = resolve(locked.digest)
    except EnvironmentNotFound as error:
        raise _missing(name, locked, resolve) from error
    if (layers := _digests(found)) != locked.layers:
        strange = next((layer for layer in locked.layers if layer not in layers), locked.layers[0])
        raise LockMismatch(f"{name} is {locked.digest}, which has no layer {strange} there", field=_LOCKED)
    named = _or_none(name, resolve)
    return found if named is None or (_digests(named), named.config) != (layers, found.config) else named


def _missing(name: str, locked: LockedLayers, resolve: Callable[[str], Layer]) -> EnvironmentNotFound | LockMismatch:
    if (here := _or_none(name, resolve)) is not None:
        said = f"{name} is not what was locked: its layers here are {', '.join(_digests(here))}, not {locked.digest}"
        return LockMismatch(said, hint="lock anew, or bring those layers here", field=_LOCKED)
    hint = "import the same content here, under any name"
    return EnvironmentNotFound(f"{name} is not here: {locked.digest}", hint=hint, field=_LOCKED)


def _or_none(name: str, resolve: Callable[[str], Layer]) -> Layer | None:
    try:
        return resolve(name)
    except EnvironmentNotFound:
        return None


def _digests(image: Layer) -> tuple[str, ...]:
    return tuple(layer.digest for layer in _layers(image))


def _layers(image: Layer) -> tuple[Layer, ...]:
    """Bottom first."""
    return (*image.below, image)


def _check_number(layers: int) -> None:
    if layers > MOST:
        raise InvalidRequest(f"environment: {layers} layers, at most {MOST}", field="environment.toolkits")
