"""What a build tells while it goes on."""

from __future__ import annotations

from typing import Protocol

import msgspec

from barchan.builds.dockerfile import Place
from barchan.images import NO_CONFIG, ImageConfig


class Heading(msgspec.Struct, frozen=True):
    """A step, as people see it: `[build 2/5] RUN make`."""

    place: Place
    stage: str
    number: int
    total: int
    text: str

    def __str__(self) -> str:
        return f"[{self.stage} {self.number}/{self.total}] {self.text}"


class Report(Protocol):
    """Told from the event loop; must not block."""

    def began(self, heading: Heading) -> None: ...

    def output(self, data: bytes) -> None:
        """Of the program that runs. Whatever bytes it writes."""

    def ended(self, heading: Heading, seconds: float, *, cached: bool) -> None: ...

    def note(self, text: str) -> None: ...


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a step."""

    line: int
    stage: str
    text: str
    name: str
    """Under which its layers are kept."""
    cached: bool
    seconds: float = 0.0


class BuildResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was built."""

    name: str
    reference: str
    """`name@version`: always means this."""
    digest: str
    layers: int
    steps: tuple[StepResult, ...]
    notes: tuple[str, ...] = ()
    config: ImageConfig = NO_CONFIG
    """What the environment says of itself."""
    seconds: float = 0.0

    @property
    def cached(self) -> int:
        """Steps that did not have to be carried out."""
        return sum(step.cached for step in self.steps)
