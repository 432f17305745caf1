"""`barchan env build`: an environment from a Dockerfile, on this host's server or another."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from barchan.cli.connect import Where, open_client, where_options
from barchan.cli.session import Session, json_option
from barchan.cli.text import plain
from barchan.cli.values import SIZE
from barchan.errors import CommandFailed, FileFailure, FileMissing, InvalidRequest

if TYPE_CHECKING:
    from barchan.builds.build import BuildOrder
    from barchan.builds.report import BuildResult, Heading, Report

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@click.command("build")
@click.argument("context", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-t", "--tag", "name", metavar="NAME", required=True, help="Name of the environment.")
@click.option(
    "-f",
    "--file",
    "dockerfile",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="[default: DIR/Dockerfile]",
)
@click.option(
    "--build-arg",
    "build_args",
    metavar="K[=V]",
    multiple=True,
    help="For ARG; without V from our environment; repeatable.",
)
@click.option("--target", metavar="STAGE", default="", help="Build this stage.  [default: the last one]")
@click.option("--no-cache", is_flag=True, help="Carry out every step.")
@click.option(
    "--network",
    type=click.Choice(["auto", "open", "deny"]),
    default="auto",
    show_default=True,
    help="What RUN may reach; auto: the Internet, where a node allows it.",
)
@click.option(
    "--progress",
    type=click.Choice(["auto", "plain", "quiet"]),
    default="auto",
    show_default=True,
    help="How to show it.",
)
@click.option("--memory", type=SIZE, metavar="SIZE", help="Of the sandbox of each step.  [default: 512m]")
@click.option("--cpus", type=float, metavar="N", help="CPUs, fractions allowed.  [default: 1]")
@click.option("--pids", type=int, metavar="N", help="Processes and threads.  [default: 512]")
@click.option("--disk", type=SIZE, metavar="SIZE", help="Bytes that one step may write.  [default: 2g]")
@where_options
@json_option
@click.pass_obj
def build_command(session: Session, /, where: Where, progress: str, **options: Any) -> int:
    """Make the environment NAME from the Dockerfile in DIR. No Docker is needed.

    Each step runs in a sandbox and becomes a layer, which later builds take up again. What a Dockerfile may hold and what of it is
    refused: docs/reference/dockerfile.md.
    """
    order = _order(**options)
    report = (
        _Quiet()
        if session.json or progress == "quiet"
        else _Plain(session, colour=progress == "auto" and sys.stderr.isatty())
    )
    try:
        result = asyncio.run(_build(where, order, report))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except CommandFailed as error:
        if not isinstance(report, _Quiet):
            error.hint = ""  # the output has been shown
        raise
    _show(session, result)
    return 0


def _order(
    context: Path,
    name: str,
    dockerfile: Path | None,
    build_args: tuple[str, ...],
    target: str,
    no_cache: bool,
    network: Literal["auto", "open", "deny"],
    **limits: Any,
) -> BuildOrder:
    """Everything on this side is read and checked here, before a server is asked."""
    from barchan.builds.build import BuildOrder
    from barchan.builds.context import LocalContext, read_ignore
    from barchan.builds.dockerfile import parse
    from barchan.names import check_name
    from barchan.spec import Limits

    path = dockerfile or context / "Dockerfile"
    return BuildOrder(
        dockerfile=parse(_read(path), plain(str(dockerfile or "Dockerfile"))),
        context=LocalContext(context, read_ignore(context, path)),
        name=check_name(name, "name"),
        build_args=dict(_build_arg(text) for text in build_args if _given(text)),
        target=target,
        network=network,
        cached=not no_cache,
        limits=Limits(**{key: value for key, value in limits.items() if value is not None}),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise FileMissing(f"{path}: no such file", hint="-f names another one") from error
    except OSError as error:
        raise FileFailure(f"{path}: {error.strerror}", hint="on this host") from error


def _given(text: str) -> bool:
    """As in Docker, a name alone stands for our own variable, and for nothing if there is none."""
    return "=" in text or text in os.environ


def _build_arg(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name:
        raise InvalidRequest(f"build_arg: {text!r} is not NAME=VALUE", field="build_arg")
    return name, value if equals else os.environ[name]


async def _build(where: Where, order: BuildOrder, report: Report) -> BuildResult:
    """Ends what it began when it is asked to end."""
    from barchan.builds.build import build

    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in _ENDING:
        loop.add_signal_handler(number, task.cancel)
    async with open_client(where) as client:
        return await build(client, order, report)


def _show(session: Session, result: BuildResult) -> None:
    if session.json:
        import msgspec

        session.emit({**msgspec.structs.asdict(result), "cached": result.cached})
        return
    carried_out = len(result.steps) - result.cached
    session.note(
        f"{result.layers} layers, {carried_out} steps carried out, {result.cached} cached, {result.seconds:.1f} s"
    )
    click.echo(f"{result.reference}  {result.digest}")


class _Quiet:
    """Says nothing."""

    def began(self, heading: Heading) -> None:
        pass

    def output(self, data: bytes) -> None:
        pass

    def ended(self, heading: Heading, seconds: float, *, cached: bool) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class _Plain:
    """Lines on stderr: steps, and what their programs write. What comes from a sandbox cannot look like anything else."""

    def __init__(self, session: Session, *, colour: bool) -> None:
        self._session, self._colour = session, colour
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""

    def began(self, heading: Heading) -> None:
        self._session.note(self._styled(plain(str(heading)), bold=True))

    def output(self, data: bytes) -> None:
        *lines, self._line = (self._line + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._tell(line)
        if len(self._line) > 1 << 16:
            self._rest()

    def ended(self, heading: Heading, seconds: float, *, cached: bool) -> None:
        self._rest()
        text = f"CACHED {plain(str(heading))}" if cached else f"  done in {seconds:.1f} s"
        self._session.note(self._styled(text, dim=True))

    def note(self, text: str) -> None:
        self._session.note(f"barchan: {plain(text)}")

    def _rest(self) -> None:
        """A last line without an end."""
        if self._line:
            self._tell(self._line)
        self._line = ""

    def _tell(self, line: str) -> None:
        """Of what a program wrote over itself, what was there at last."""
        shown = [part for part in line.split("\r") if part]
        self._session.note(f"  | {plain(shown[-1])}" if shown else "  |")

    def _styled(self, text: str, **style: bool) -> str:
        return click.style(text, **style) if self._colour else text
