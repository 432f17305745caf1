"""`barchan run`, `barchan exec` and `barchan shell`."""

from __future__ import annotations

import base64
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import click
import msgspec

from barchan.cli.argv import ProgramCommand
from barchan.cli.connect import CREATE_SECONDS, Where, open_client, start, where_options
from barchan.cli.exits import NEVER_RAN, ending
from barchan.cli.request import (
    OUTPUT_LIMIT,
    check_shell_use,
    check_terminal_use,
    exec_options,
    exec_request,
    program_options,
    sandbox_options,
    sandbox_spec,
)
from barchan.cli.session import Session, json_option
from barchan.errors import InvalidRequest
from barchan.images import stacked
from barchan.spec import Exec, ExecResult, SandboxSpec, node_of

if TYPE_CHECKING:
    from barchan.cli.descriptors import Output
    from barchan.cli.drive import Sink
    from barchan.cli.interrupts import Interrupts
    from barchan.sdk import Client, Sandbox

TERMINAL_RECONNECT = 10.0
"""Seconds that a terminal waits for a server that is away; less than others, because nothing can be typed meanwhile."""


@click.command(cls=ProgramCommand)
@click.argument("env_", metavar="ENV")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@sandbox_options
@exec_options
@click.option("--keep", is_flag=True, help="Leave the sandbox running.")
@where_options
@json_option
@click.pass_obj
def run(session: Session, /, env_: str, argv: tuple[str, ...], keep: bool, where: Where, **options: Any) -> int:
    """Run a command in a new sandbox of environment ENV. With -it, a terminal to work in.

    ENV is a name, an image of a registry (docker://debian:12) or a lock file (./env.lock). The command is run as it stands, whatever
    entrypoint an image has. Without one it is the image's own, entrypoint and command; where there is none either, with -i, a
    shell, bash or sh: it reads commands from standard input.

    Exit codes: the program's own; 124 timed out, 125 barchan failed, 126 not executable, 127 not found, 137 killed.
    """
    # With --keep later commands get them too; otherwise they are of this command alone, where any bytes will do.
    ofsandbox = options if keep else {**options, "env": (), "secrets": (), "user": None, "workdir": None}
    spec = sandbox_spec(env_, ofsandbox)
    request = exec_request(argv, options)
    check_terminal_use(request, json=session.json)
    return _complete(_run(session, where, spec, request, keep))


@click.command("exec", cls=ProgramCommand)
@click.argument("sandbox", metavar="ID")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@exec_options
@click.option(
    "-d", "--detach", is_flag=True, help="Print its id and let it run; 126 or 127, and no id, if it cannot start."
)
@where_options
@json_option
@click.pass_obj
def exec_command(
    session: Session, /, sandbox: str, argv: tuple[str, ...], detach: bool, where: Where, **options: Any
) -> int:
    """Run a command in sandbox ID, as `barchan run` does in a new one."""
    node_of(sandbox)
    request = exec_request(argv, options)
    check_shell_use(request)
    if detach and (request.tty is not None or not argv):
        raise InvalidRequest("--detach: neither with --tty nor without a command", field="detach")
    check_terminal_use(request, json=session.json)
    return _complete(_exec(session, where, sandbox, request, detach))


@click.command()
@click.argument("sandbox", metavar="ID")
@program_options
@where_options
@json_option
@click.pass_obj
def shell(session: Session, /, sandbox: str, where: Where, **options: Any) -> int:
    """Work in sandbox ID: bash, or sh where there is none, on a terminal. As `barchan exec -it ID`."""
    node_of(sandbox)
    more = {"interactive": True, "tty": True, "timeout": None, "output_limit": OUTPUT_LIMIT}
    request = exec_request((), {**options, **more})
    check_terminal_use(request, json=session.json)
    return _complete(_exec(session, where, sandbox, request, detach=False))


async def _run(session: Session, where: Where, spec: SandboxSpec, request: Exec, keep: bool) -> int:
    from barchan.cli.interrupts import Interrupts
    from barchan.cli.pulling import pull_bars

    with Interrupts() as interrupts:
        async with _client(where, request) as client:
            with pull_bars(session) as told:
                sandbox = await client.create_from(spec, timeout=CREATE_SECONDS, progress=told)
            try:
                _say(session, "created", keep, sandbox=sandbox.id)
                if interrupts.first is not None:
                    return 128 + interrupts.first
                if not request.argv:
                    request = msgspec.structs.replace(request, argv=await _own_command(client, sandbox))
                    check_shell_use(
                        request, "Missing argument 'ARGV...', and the environment has no command of its own"
                    )
                return await _follow(session, sandbox, request, interrupts)
            finally:
                if not keep:
                    await sandbox.stop()


async def _own_command(client: Client, sandbox: Sandbox) -> tuple[bytes, ...]:
    """What its images say is to be run: entrypoint and command."""
    lock = await client.lock(sandbox.info.environment)
    config = stacked(image.config for image in lock.images)
    return tuple(word.encode() for word in (*config.entrypoint, *config.command))


async def _exec(session: Session, where: Where, id_: str, request: Exec, detach: bool) -> int:
    from barchan.cli.interrupts import Interrupts

    with Interrupts() as interrupts:
        async with _client(where, request) as client:
            sandbox = await client.get(id_)
            if detach:
                return await _leave(session, sandbox, request)
            return await _follow(session, sandbox, request, interrupts)


def _client(where: Where, request: Exec) -> Client:
    return open_client(where) if request.tty is None else open_client(where, reconnect=TERMINAL_RECONNECT)


async def _leave(session: Session, sandbox: Sandbox, request: Exec) -> int:
    """Start a command and let it run; one that could not be started has its reason as exit code."""
    process = await start(sandbox, request)
    if not process.pid:  # it never ran, or has ended already, or runs and its number is not known here yet
        result = next((info.result for info in await sandbox.execs() if info.id == process.id), None)
        if result is not None and result.outcome in NEVER_RAN:
            return finish(session, result, request.argv[0])
    session.emit({"exec": process.id}) if session.json else click.echo(process.id)
    process.detach()
    return 0


def _say(session: Session, event: str, aloud: bool, **details: str) -> None:
    if session.json:
        session.emit({"event": event, **details})
    elif aloud:
        session.note("barchan: " + "  ".join(f"{key} {value}" for key, value in details.items()))


async def _follow(session: Session, sandbox: Sandbox, request: Exec, interrupts: Interrupts) -> int:
    """Run a command with our standard streams; returns our exit code."""
    from barchan.cli import terminal
    from barchan.cli.descriptors import Input
    from barchan.cli.drive import Drive

    if request.tty is not None:
        result = await terminal.drive(sandbox, request, interrupts)
        return finish(session, result, (request.argv or (b"sh",))[0], interrupts.first)
    if not request.argv:
        request = msgspec.structs.replace(request, argv=(await terminal.shell_of(sandbox),))
    process = await start(sandbox, request)
    drive = Drive(process, interrupts)
    out, err = _sinks(session)
    outputs = ((aiter(process.stdout), out), (aiter(process.stderr), err))
    result = await drive.run(outputs, Input(0) if request.stdin else None, process.stdin)
    if drive.output_failure is not None:
        raise drive.output_failure
    return finish(session, result, request.argv[0], interrupts.first)


def finish(session: Session, result: ExecResult, program: bytes, interrupted: int | None = None) -> int:
    """Say how a command ended, as far as its output did not; returns the exit code for it."""
    code, notes, error = ending(result, program, interrupted=interrupted)
    if session.json:
        session.emit({"event": "result", "exit_code": code, "result": result})
    for note in notes if not session.json else ():
        session.note(note)
    if error is not None:
        session.report(error)
    return code


def _sinks(session: Session) -> tuple[Sink, Sink]:
    """Where output goes: to its own descriptor as it is, or both to stdout as JSON lines."""
    from barchan.cli.descriptors import Output

    if not session.json:
        return Output(1).write, Output(2).write
    output = Output(1)
    return _lines(output, "stdout"), _lines(output, "stderr")


def _lines(output: Output, name: str) -> Sink:
    from barchan.cli.session import to_json

    async def write(data: bytes) -> None:
        text = base64.b64encode(data).decode()
        await output.write(to_json({"event": "output", "stream": name, "base64": text}) + b"\n")

    return write


def _complete(work: Coroutine[Any, Any, int]) -> int:
    import asyncio

    try:
        return asyncio.run(work)
    except asyncio.CancelledError:  # the user did not want to wait any longer
        return 128 + signal.SIGINT
