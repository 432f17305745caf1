"""What a build does: the values that planning makes and carrying out takes."""

from __future__ import annotations

import msgspec

from barchan.builds.dockerfile import Place
from barchan.images import NO_CONFIG, ImageConfig

NETWORKS = ("open", "deny")


class Context(msgspec.Struct, frozen=True, tag="context"):
    """The directory that is built from."""


class OfStage(msgspec.Struct, frozen=True, tag="stage"):
    """What an earlier stage has become."""

    index: int


class OfImage(msgspec.Struct, frozen=True, tag="image"):
    """Another environment, or an image of a registry, as it was written."""

    name: str


Origin = Context | OfStage | OfImage


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    place: Place
    text: str
    """As people see it."""


class Inline(msgspec.Struct, frozen=True):
    """A file that the Dockerfile itself holds."""

    name: str
    content: str


class Run(_Step, frozen=True, kw_only=True):
    argv: tuple[str, ...]
    script: Inline | None = None
    """What it reads, by its path, while it runs."""
    env: dict[str, str] = {}
    hidden: dict[str, str] = {}
    """Variables that make no difference: proxies."""
    user: str = ""
    workdir: str = "/"
    network: bool = True
    """Whether it may have one."""


class Copy(_Step, frozen=True, kw_only=True):
    sources: tuple[str, ...]
    """Without a slash in front; with wildcards."""
    inline: tuple[Inline, ...] = ()
    target: str
    """Absolute; ends with a slash where it must be a directory."""
    origin: Origin = Context()
    owner: str = ""
    mode: int | None = None
    exclude: tuple[str, ...] = ()
    unpack: bool = False


class MakeDirectory(_Step, frozen=True, kw_only=True):
    """What WORKDIR makes, if it is missing."""

    path: str
    user: str = ""


Step = Run | Copy | MakeDirectory


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, planned: what it begins with, what it does, and what the result says of itself."""

    index: int
    name: str = ""
    base: Origin | None = None
    """None: nothing at all."""
    steps: tuple[Step, ...] = ()
    config: ImageConfig = NO_CONFIG
    notes: tuple[str, ...] = ()
    """What was left aside."""
