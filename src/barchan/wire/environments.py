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
    reference: str = ""
    """The one name that always means this: `debian-12@3`; of an image the one with its digest."""
    tags: tuple[str, ...] = ()
    """Other names that mean this version now: `debian-12:stable`, and aliases."""


class ListEnvironments(Request, frozen=True, kw_only=True):
    op = "environment.list"
    answer = tuple[EnvironmentInfo, ...]


class PullImage(Request, frozen=True, kw_only=True):
    """Fetch an image. EVENT `PullProgress` while that lasts; REPLY when it is there. It goes on when its caller gives up."""

    op = "environment.pull"
    answer = EnvironmentInfo
    image: str
    again: bool = True
    """Ask the registry what a tag means now; otherwise an image of it that is there will do."""
    node: str | None = None
    """None: every node. The answer is the first one's, by name."""


class LockEnvironment(Request, frozen=True, kw_only=True):
    """What the names of an environment mean now, on the first node that has them all."""

    op = "environment.lock"
    answer = EnvironmentLock
    environment: EnvironmentRef
