"""A build carried out: each step in a sandbox of what the steps before it made, and what it changed becomes a layer.

Everything goes through a client, so that the server may be anywhere. Whatever ends a build, no sandbox of it stays; the
steps that were carried out are kept under names of their own (`keys.step_name`), and the next build begins after them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from barchan.builds.bases import Bases
from barchan.builds.context import LocalContext, Source
from barchan.builds.dockerfile import Dockerfile
from barchan.builds.keys import first_key, step_key, step_name
from barchan.builds.placing import make_directory, place_local, place_made
from barchan.builds.plan import plan, unused
from barchan.builds.report import BuildResult, Heading, Report, StepResult
from barchan.builds.running import run_step
from barchan.builds.stages import Outline, outline
from barchan.builds.steps import Context, Copy, MakeDirectory, OfStage, Origin, Run, Stage, Step
from barchan.errors import EnvironmentNotFound, InvalidRequest
from barchan.images import NO_CONFIG, ImageConfig
from barchan.networks import NetworkMode, NetworkRules
from barchan.packing import PackedLayer, RuleName, ScrubRules
from barchan.spec import EnvironmentRef, Limits

if TYPE_CHECKING:
    from barchan.sdk import Client, Sandbox

KEEP_ALL = ScrubRules(keep=get_args(RuleName))
"""A Dockerfile says what is to be there: what one RUN leaves in /tmp the next one may need."""
LABEL = {"made-for": "build"}
CREATE_TIMEOUT = 600.0
"""Seconds; a node may have much to do."""


class BuildOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to build."""

    dockerfile: Dockerfile
    context: LocalContext
    name: str
    """Of the environment that it becomes."""
    build_args: dict[str, str] = {}
    target: str = ""
    """Name or number of the stage to build; "" for the last one."""
    network: Literal["auto", "open", "deny"] = "auto"
    """What RUN may reach; `auto`: an open network where a node has such."""
    cached: bool = True
    """Use what earlier builds have made."""
    limits: Limits = Limits()
    """Of the sandbox of each step."""


class _Planned(NamedTuple):
    stage: Stage
    keys: tuple[str, ...]
    """Of what it begins with, and after each step."""
    sources: tuple[tuple[Source, ...], ...]
    """What each step copies from the context."""


async def build(client: Client, order: BuildOrder, report: Report) -> BuildResult:
    """Raises `InvalidRequest` (before anything runs), `CommandFailed` for a RUN that did not end well, and whatever the client raises;
    the message names the line."""
    began = time.monotonic()
    found = outline(order.dockerfile, order.build_args, order.target)
    for name in unused(found, order.build_args):
        report.note(f"build argument {name} is not used")
    builder = _Builder(client, order, report, found)
    await builder.prepare()
    packed, config = await builder.finish()
    return BuildResult(
        name=packed.name,
        reference=packed.reference,
        digest=packed.digest,
        layers=packed.layers,
        steps=tuple(builder.results),
        notes=tuple(builder.notes),
        config=config,
        seconds=time.monotonic() - began,
    )


class _Builder:
    def __init__(self, client: Client, order: BuildOrder, report: Report, found: Outline) -> None:
        self.results: list[StepResult] = []
        self.notes: list[str] = []
        self._client, self._order, self._report, self._found = client, order, report, found
        self._bases = Bases(client, report)
        self._planned: dict[int, _Planned] = {}
        self._open = False
        self._made: dict[int, str] = {}
        """References of stages that are there."""

    # --- before anything runs

    async def prepare(self) -> None:
        """Know what every stage that is needed does, and by which keys its steps are known."""
        self._open = self._order.network == "open" or (self._order.network == "auto" and await self._offered())
        for index in self._found.needed:
            raw = self._found.stages[index]
            with raw.place.naming():
                base = await self._config_of(raw.base)
            stage = plan(self._found, raw, base, self._order.build_args)
            for note in stage.notes:
                self._note(note)
            self._planned[index] = await self._keyed(stage)

    async def _offered(self) -> bool:
        """Whether a node can give a sandbox an open network. Looked for only where it matters."""
        stages = [self._found.stages[index] for index in self._found.needed]
        if not any(one.name == "RUN" and one.flag("network") != "none" for stage in stages for one in stage.body):
            return False
        offered = any(node.network.open for node in await self._client.nodes())
        if not offered:
            self._note("no node has an open network: RUN reaches nothing")
        return offered

    async def _config_of(self, base: Origin | None) -> ImageConfig:
        if isinstance(base, OfStage):
            return self._planned[base.index].stage.config
        return (await self._bases.of(base)).config

    async def _keyed(self, stage: Stage) -> _Planned:
        keys, copied = [await self._key_of(stage.base)], []
        for step in stage.steps:
            with step.place.naming():
                sources = await self._sources(step)
                what = await self._copied(step, sources)
            keys.append(step_key(keys[-1], step, network=self._network(step), copied=what))
            copied.append(sources)
        return _Planned(stage, tuple(keys), tuple(copied))

    async def _key_of(self, origin: Origin | None) -> str:
        if isinstance(origin, OfStage):
            return self._planned[origin.index].keys[-1]
        return first_key((await self._bases.of(origin)).digest)

    async def _sources(self, step: Step) -> tuple[Source, ...]:
        if not isinstance(step, Copy) or not isinstance(step.origin, Context):
            return ()
        return await self._bases.aside(self._look, step)

    def _look(self, step: Copy) -> tuple[Source, ...]:
        """Blocks."""
        context, found = self._order.context, list[Source]()
        for source in step.sources:
            try:
                sources = context.find(source, step.exclude)
            except FileNotFoundError as error:
                why = f" ({error.strerror})" if error.errno is None else ""
                raise InvalidRequest(f"{source!r} is not in the context{why}", field="source") from error
            if not sources:
                self._note(f"{step.place}: nothing matches {source!r}")
            found += sources
        if len(found) > 1 and not step.target.endswith("/"):
            raise InvalidRequest("several sources need a directory to go to: end it with a slash", field="target")
        for path in context.skipped:
            self._note(f"{step.place}: {path} is no file, directory or link: left out")
        context.skipped.clear()
        return tuple(found)

    async def _copied(self, step: Step, sources: tuple[Source, ...]) -> Any:
        if not isinstance(step, Copy):
            return None
        if isinstance(step.origin, Context):
            return [source.document for source in sources]
        return (await self._key_of(step.origin), step.sources, step.exclude)

    def _network(self, step: Step) -> NetworkMode:
        return "open" if isinstance(step, Run) and step.network and self._open else "deny"

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._report.note(text)

    # --- carrying out

    async def finish(self) -> tuple[PackedLayer, ImageConfig]:
        """Everything that is missing, and then the name."""
        target = self._found.needed[-1]
        made, config = await self._stage(target), self._planned[target].stage.config
        async with self._sandbox(made) as sandbox:
            packed = await sandbox.pack_diff(self._order.name, whole=True, config=config, scrub=KEEP_ALL)
        return packed, config

    async def _stage(self, index: int) -> str:
        """The reference of what a stage has become; carried out once, from behind the last step that is known."""
        if index not in self._made:
            planned = self._planned[index]
            begun, made = await self._known(planned)
            for origin in sorted(_stages_of(planned.stage, begun)):
                await self._stage(origin)
            for number, step in enumerate(planned.stage.steps, 1):
                if number <= begun:
                    self._ended(planned, number, 0.0, cached=True)
                else:
                    made = await self._step(planned, number, step, made or await self._base(planned.stage))
            self._made[index] = made or await self._base(planned.stage)
        return self._made[index]

    async def _known(self, planned: _Planned) -> tuple[int, str]:
        """How many steps need not be carried out, and what they made."""
        if self._order.cached:
            for number in range(len(planned.stage.steps), 0, -1):
                with contextlib.suppress(EnvironmentNotFound):
                    found = await self._client.lock(step_name(planned.keys[number]))
                    return number, found.base.reference
        return 0, ""

    async def _base(self, stage: Stage) -> str:
        if isinstance(stage.base, OfStage):
            return await self._stage(stage.base.index)
        return (await self._bases.of(stage.base)).reference

    async def _step(self, planned: _Planned, number: int, step: Step, before: str) -> str:
        key, sources = planned.keys[number], planned.sources[number - 1]
        async with self._origin(step) as origin:
            began = time.monotonic()
            self._report.began(self._heading(planned, number))
            with step.place.naming():
                async with self._sandbox(before, self._network(step)) as sandbox:
                    await self._carry_out(sandbox, step, sources, origin)
                    packed = await sandbox.pack_diff(step_name(key), whole=True, config=NO_CONFIG, scrub=KEEP_ALL)
            self._ended(planned, number, time.monotonic() - began, cached=False)
        return packed.reference

    async def _carry_out(
        self, sandbox: Sandbox, step: Step, sources: tuple[Source, ...], origin: Sandbox | None
    ) -> None:
        if isinstance(step, Run):
            await run_step(sandbox, step, self._report)
        elif isinstance(step, MakeDirectory):
            await make_directory(sandbox, step)
        elif origin is None:
            await place_local(sandbox, step, sources, Path(self._order.context.root))
        else:
            for source in await place_made(sandbox, step, origin):
                self._note(f"{step.place}: nothing matches {source!r}")

    @contextlib.asynccontextmanager
    async def _origin(self, step: Step) -> AsyncIterator[Sandbox | None]:
        """A sandbox of the stage or the image that a COPY reads."""
        if not isinstance(step, Copy) or isinstance(step.origin, Context):
            yield None
            return
        if isinstance(step.origin, OfStage):
            reference = await self._stage(step.origin.index)
        else:
            reference = (await self._bases.of(step.origin)).reference
        async with self._sandbox(reference) as sandbox:
            yield sandbox

    @contextlib.asynccontextmanager
    async def _sandbox(self, reference: str, network: NetworkMode = "deny") -> AsyncIterator[Sandbox]:
        async with await self._client.create(
            EnvironmentRef(base=reference),
            limits=self._order.limits,
            network=NetworkRules(mode=network),
            labels=LABEL,
            user="root",
            workdir="/",
            setuid=True,
            timeout=CREATE_TIMEOUT,
        ) as sandbox:
            yield sandbox

    # --- telling

    def _heading(self, planned: _Planned, number: int) -> Heading:
        stage, step = planned.stage, planned.stage.steps[number - 1]
        name = stage.name or f"stage-{stage.index}"
        return Heading(step.place, name, number, len(stage.steps), step.text)

    def _ended(self, planned: _Planned, number: int, seconds: float, *, cached: bool) -> None:
        heading = self._heading(planned, number)
        self._report.ended(heading, seconds, cached=cached)
        self.results.append(
            StepResult(
                line=heading.place.line,
                stage=heading.stage,
                text=heading.text,
                name=step_name(planned.keys[number]),
                cached=cached,
                seconds=round(seconds, 3),
            )
        )


def _stages_of(stage: Stage, begun: int) -> set[int]:
    """Stages that must be there before the steps from `begun` on are carried out."""
    origins = [step.origin for step in stage.steps[begun:] if isinstance(step, Copy)]
    return {origin.index for origin in (*origins, *((stage.base,) if not begun else ())) if isinstance(origin, OfStage)}
