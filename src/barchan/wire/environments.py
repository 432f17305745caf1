"""Calls about environments; see `messages`."""

from __future__ import annotations

import msgspec

from barchan.environments import EnvironmentRef
from barchan.locks import EnvironmentLock
from barchan.wire.request import Request


class EnvironmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that can be named."""

    name: str
    version: int
    digest: str
    size: int
    created: float
    tags: tuple[str, ...] = ()
    """Other names that mean this version now: `debian-12:stable`, and aliases."""


class ListEnvironments(Request, frozen=True, kw_only=True):
    op = "environment.list"
    answer = tuple[EnvironmentInfo, ...]


class LockEnvironment(Request, frozen=True, kw_only=True):
    """What the names of an environment mean now, on the first node that has them all."""

    op = "environment.lock"
    answer = EnvironmentLock
    environment: EnvironmentRef
