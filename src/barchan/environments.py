"""Which layers a sandbox is made of, as its caller names them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from barchan.errors import InvalidRequest, LockMismatch
from barchan.names import DIGEST, check_ref
from barchan.sizes import size


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As those of `spec`."""


class LockedLayers(_Value, frozen=True, kw_only=True):
    """What a name must be: the digest of the image, and of its layers, bottom first."""

    digest: str
    layers: tuple[str, ...]


class EnvironmentRef(_Value, frozen=True, kw_only=True):
    """Layers to compose, by name (`debian-12`, `debian-12@3`, `debian-12:stable`) or digest (`sha256:…`)."""

    base: str
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    """What the names above were when they were asked for, from the bottom up. Filters match it too; nothing is made by it."""
    locked: tuple[LockedLayers, ...] = ()
    """Of a lock file: for each name, from the bottom up, what it must be; none for whatever the names mean."""

    def names(self) -> tuple[str, ...]:
        """From the bottom of the stack to its top."""
        return (self.base, *((self.workspace,) if self.workspace else ()), *self.toolkits)


PullPhase = Literal["waiting", "resolve", "pull", "convert"]


class PullProgress(_Value, frozen=True, kw_only=True):
    """How far a node is with fetching an image."""

    image: str
    phase: PullPhase
    """*waiting* for other images or for another who fetches it; *resolve*: which one is meant; *pull* and *convert*: of `layer`."""
    layer: int = 0
    """From 1; 0 before its layers are known."""
    layers: int = 0
    done: int = 0
    """Bytes of its blobs that are here, those that need not be fetched included."""
    total: int = 0
    """Bytes of all of them; 0 before they are known."""
    node: str = ""

    def __str__(self) -> str:
        """For people: `docker://…: pull of layer 2 of 5, 34.0 MiB of 120.0 MiB`."""
        if not self.layers:
            return f"{self.image}: {self.phase}"
        return f"{self.image}: {self.phase} of layer {self.layer} of {self.layers}, {size(self.done)} of {size(self.total)}"


Told = Callable[[PullProgress], None]


def untold(progress: PullProgress) -> None:
    """For whoever does not want to know."""


MOST_LOCKED = 100
"""Layers of one name."""
MOST_ASKED = 100


def check_environment(environment: EnvironmentRef) -> None:
    for i, ref in enumerate(environment.names()):
        check_ref(ref, "environment.base" if i == 0 else "environment")
    if len(environment.asked) > MOST_ASKED:
        raise InvalidRequest(f"environment.asked: {len(environment.asked)} names", field="environment.asked")
    for ref in environment.asked:
        check_ref(ref, "environment.asked")
    check_locked(environment)


def check_locked(environment: EnvironmentRef) -> None:
    locked, names = environment.locked, environment.names()
    if locked and len(locked) != len(names):
        said = f"environment.locked: {len(locked)} for {len(names)} names"
        raise LockMismatch(said, field="environment.locked", hint="one for each")
    for name, one in zip(names, locked, strict=False):
        if not 1 <= len(one.layers) <= MOST_LOCKED:
            said = f"environment.locked: {name} has {len(one.layers)} layers"
            raise InvalidRequest(said, field="environment.locked", hint=f"1 to {MOST_LOCKED}")
        for digest in (one.digest, *one.layers):
            if not DIGEST.fullmatch(digest):
                raise InvalidRequest(f"environment.locked: {digest[:80]!r} is no digest", field="environment.locked")
