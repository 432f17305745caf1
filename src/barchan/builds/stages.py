"""Which stages a Dockerfile has, what each begins with, and which of them are needed. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from barchan.builds.dockerfile import Dockerfile, Instruction, Place
from barchan.builds.steps import Context, OfImage, OfStage, Origin
from barchan.builds.variables import Words
from barchan.errors import InvalidRequest

PLATFORM = "linux/amd64"
PLATFORM_ARGS = {
    **{f"{side}PLATFORM": PLATFORM for side in ("TARGET", "BUILD")},
    **{f"{side}OS": "linux" for side in ("TARGET", "BUILD")},
    **{f"{side}ARCH": "amd64" for side in ("TARGET", "BUILD")},
    **{f"{side}VARIANT": "" for side in ("TARGET", "BUILD")},
}
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
SCRATCH = "scratch"


class RawStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage as it is written. `base` None: nothing."""

    index: int
    name: str
    place: Place
    base: Origin | None
    body: tuple[Instruction, ...]

    def reads(self, stages: tuple[RawStage, ...]) -> tuple[int, ...]:
        """Stages that must be built before it."""
        froms = [origin_of(one, stages[: self.index]) for one in self.body if one.name == "COPY"]
        return tuple(origin.index for origin in (self.base, *froms) if isinstance(origin, OfStage))


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    escape: str
    stages: tuple[RawStage, ...]
    arguments: dict[str, str]
    """Of the whole file: what stands before the first FROM, and the platform."""
    needed: tuple[int, ...]
    """Stages to build, each after those that it reads; the last one is the target."""


def outline(found: Dockerfile, build_args: Mapping[str, str], target: str = "") -> Outline:
    """Raises `InvalidRequest` for what cannot be, in any stage."""
    words = Words(found.escape)
    first = next(at for at, one in enumerate(found.instructions) if one.name == "FROM")
    arguments = dict(PLATFORM_ARGS)
    for one in found.instructions[:first]:
        if one.name != "ARG":
            raise one.place.refused(f"{one.name} stands before the first FROM", "only ARG may")
        for name, default in words.arguments(one, arguments):
            if (value := build_args.get(name, default)) is not None:
                arguments[name] = value
    stages = _stages(found.instructions[first:], {**arguments, **_given(arguments, build_args)}, words)
    last = _target(stages, target)
    for stage in stages:
        stage.reads(stages)  # refuses what names no stage that it may read
    return Outline(
        file=found.file, escape=found.escape, stages=stages, arguments=arguments, needed=_needed(stages, last)
    )


def _given(arguments: Mapping[str, str], build_args: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in build_args.items() if name in arguments}


def _stages(instructions: tuple[Instruction, ...], arguments: Mapping[str, str], words: Words) -> tuple[RawStage, ...]:
    stages: list[RawStage] = []
    for one in instructions:
        if one.name == "FROM":
            stages.append(_stage(one, tuple(stages), arguments, words))
        else:
            stages[-1] = msgspec.structs.replace(stages[-1], body=(*stages[-1].body, one))
    return tuple(stages)


def _stage(one: Instruction, before: tuple[RawStage, ...], arguments: Mapping[str, str], words: Words) -> RawStage:
    written, name = one.args[0], _stage_name(one)
    base = words.one(one, written, arguments)
    if not base:
        raise one.refused(f"{written!r} is empty", "give the ARG a default before the first FROM, or --build-arg")
    platform = words.one(one, one.flag("platform"), arguments)
    if platform not in ("", PLATFORM):
        raise one.refused(f"--platform={platform} is not supported", f"sandboxes are {PLATFORM}")
    index = len(before)
    stage = _named(base, before)
    origin: Origin | None = None if base == SCRATCH else OfImage(base) if stage is None else OfStage(stage.index)
    return RawStage(index=index, name=name, place=one.place, base=origin, body=())


def _stage_name(one: Instruction) -> str:
    if len(one.args) == 1:
        return ""
    if len(one.args) != 3 or one.args[1].lower() != "as":
        raise one.refused("needs one argument, or three: IMAGE AS NAME")
    name = one.args[2].lower()
    if not _STAGE_NAME.fullmatch(name):
        raise one.refused(f"{one.args[2]!r} is not a name of a stage", "a letter, then letters, digits, '.', '_', '-'")
    return name


def _named(name: str, stages: tuple[RawStage, ...]) -> RawStage | None:
    return next((stage for stage in reversed(stages) if stage.name and stage.name == name.lower()), None)


def origin_of(copy: Instruction, before: tuple[RawStage, ...]) -> Origin:
    """What a COPY reads. Raises `InvalidRequest`."""
    name = copy.flag("from")
    if not name:
        return Context()
    if "$" in name:
        raise copy.refused("--from cannot hold variables", "name a stage whose FROM has them")
    if (stage := _named(name, before)) is not None:
        return OfStage(stage.index)
    if name.isdecimal():
        if int(name) >= len(before):
            raise copy.refused(f"--from={name}: there is no earlier stage of that number", "the first one is 0")
        return OfStage(int(name))
    if name == SCRATCH:
        raise copy.refused("--from=scratch: there is nothing in it")
    return OfImage(name)


def _target(stages: tuple[RawStage, ...], target: str) -> int:
    if not target:
        return len(stages) - 1
    if (stage := _named(target, stages)) is not None:
        return stage.index
    if target.isdecimal() and int(target) < len(stages):
        return int(target)
    names = ", ".join(stage.name for stage in stages if stage.name)
    raise InvalidRequest(f"target: no stage is called {target!r}", field="target", hint=f"stages: {names or 'none'}")


def _needed(stages: tuple[RawStage, ...], target: int) -> tuple[int, ...]:
    wanted = {target}
    for stage in reversed(stages):  # a stage reads only earlier ones
        if stage.index in wanted:
            wanted.update(stage.reads(stages))
    return tuple(sorted(wanted))
