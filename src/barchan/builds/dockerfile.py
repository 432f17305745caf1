"""The text of a Dockerfile as instructions, each known to be supported. Pure.

The parser is a port of BuildKit's; what is here turns what it finds into frozen values, and what barchan cannot do into an
error that names file and line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
from e2b_dockerfile_utils import (
    DockerfileInstruction,
    DockerfileSyntaxError,
    chomp_heredoc_content,
    parse_dockerfile_ast,
)

from barchan.builds.support import INSTRUCTIONS
from barchan.errors import BarchanError, InvalidRequest

MOST_BYTES = 1 << 20
FIELD = "dockerfile"


class Place(NamedTuple):
    """Where something stands, for errors and for people."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def refused(self, why: str, hint: str = "") -> InvalidRequest:
        """The error for what stands there."""
        return InvalidRequest(f"{self}: {why}", field=FIELD, hint=hint)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """What goes wrong in the block tells where it stands."""
        try:
            yield
        except BarchanError as error:
            if not error.message.startswith(f"{self.file}:"):
                error.message = f"{self}: {error.message}"
            raise


class Heredoc(msgspec.Struct, frozen=True):
    """`content` is as written, `tidy` without the tabs that `<<-` takes off."""

    name: str
    content: str
    tidy: str
    expand: bool


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """`args` as the parser cuts them: of ENV and LABEL three for each variable, of the shell form one."""

    place: Place
    name: str
    args: tuple[str, ...]
    flags: dict[str, tuple[str, ...]] = {}
    """Values by name; of a flag without a value `("",)`."""
    exec_form: bool = False
    heredocs: tuple[Heredoc, ...] = ()
    text: str = ""
    """The instruction on one line, without its heredocs."""

    def flag(self, name: str) -> str:
        """The last value; "" if it was not given."""
        return self.flags.get(name, ("",))[-1]

    def refused(self, why: str, hint: str = "") -> InvalidRequest:
        return self.place.refused(f"{self.name}: {why}", hint)


class Dockerfile(msgspec.Struct, frozen=True):
    file: str
    instructions: tuple[Instruction, ...]
    escape: str


def parse(data: bytes, file: str = "Dockerfile") -> Dockerfile:
    """`file` is what errors call it. Raises `InvalidRequest`."""
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(f"{len(data)} bytes, at most {MOST_BYTES}")
        ast = parse_dockerfile_ast(data.decode())
    except DockerfileSyntaxError as error:
        why = str(error).partition(": ")[2]
        raise Place(file, error.line or 1).refused(why) from error
    except ValueError as error:  # no UTF-8, too long
        raise InvalidRequest(f"{file}: {error}", field=FIELD, hint="a Dockerfile is text in UTF-8") from error
    found = Dockerfile(file, tuple(_instruction(file, one) for one in ast.instructions), ast.escape_token)
    if not any(one.name == "FROM" for one in found.instructions):
        raise InvalidRequest(f"{file}: no FROM", field=FIELD, hint="the first stage begins with FROM")
    return found


def _instruction(file: str, found: DockerfileInstruction) -> Instruction:
    made = Instruction(
        place=Place(file, found.start_line),
        name=found.name,
        args=tuple(found.args),
        flags=_flags(Place(file, found.start_line), found),
        exec_form=found.json,
        heredocs=tuple(Heredoc(h.name, h.content, _tidy(h.content, h.chomp), h.expand) for h in found.heredocs),
        text=" ".join(found.original.split()),
    )
    _check(made)
    return made


def _tidy(content: str, chomp: bool) -> str:
    return chomp_heredoc_content(content) if chomp else content


def _flags(place: Place, found: DockerfileInstruction) -> dict[str, tuple[str, ...]]:
    flags: dict[str, tuple[str, ...]] = {}
    for word in found.flags:
        name, _, value = word.removeprefix("--").partition("=")
        flags[name] = (*flags.get(name, ()), value)
    return flags


def _check(one: Instruction) -> None:
    """Refuse what no later step could do either. Raises `InvalidRequest`."""
    support = INSTRUCTIONS[one.name]
    if support.refused:
        raise one.place.refused(f"{one.name} is not supported", support.refused)
    for flag, values in one.flags.items():
        if flag not in support.flags:
            why = "is not supported" if flag in support.unsupported else "is no option of it"
            raise one.refused(f"--{flag} {why}", support.unsupported.get(flag, ""))
        if flag in support.valued and not all(values):
            raise one.refused(f"--{flag} needs a value")
        if flag not in support.repeated and len(values) > 1:
            raise one.refused(f"--{flag} is given twice")
    if len(one.args) < support.least:
        raise one.refused("needs a source and a destination" if support.least > 1 else "needs an argument")
    if support.most and len(one.args) > support.most:
        raise one.refused("has too many arguments")
    if support.exec_only and not one.exec_form:
        raise one.refused('needs its argument as a list: ["/bin/bash", "-c"]')
