"""`barchan wait` and `barchan kill`: commands that run without us."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import click

from barchan.cli.connect import Where, open_client, where_options
from barchan.cli.exits import NEVER_RAN
from barchan.cli.run import finish
from barchan.cli.session import Session, json_option
from barchan.cli.values import SIGNAL
from barchan.spec import ExecResult, node_of

if TYPE_CHECKING:
    from barchan.sdk import Sandbox


@click.command()
@click.argument("sandbox", metavar="ID")
@click.argument("exec_", metavar="EXEC")
@where_options
@json_option
@click.pass_obj
def wait(session: Session, sandbox: str, exec_: str, where: Where) -> int:
    """Wait for command EXEC of sandbox ID to end. Exit codes as if `barchan exec` had run it; its output is not shown."""
    node_of(sandbox)
    result, program = asyncio.run(_wait(where, sandbox, exec_))
    return finish(session, result, program)


async def _wait(where: Where, id_: str, exec_: str) -> tuple[ExecResult, bytes]:
    async with open_client(where) as client:
        sandbox = await client.get(id_)
        result = await (await sandbox.attach(exec_)).wait()
        return result, await _program(sandbox, result)


async def _program(sandbox: Sandbox, result: ExecResult) -> bytes:
    """For messages that name it."""
    if result.outcome not in NEVER_RAN:
        return b""
    found = next((info.argv for info in await sandbox.execs(partial=True) if info.id == result.id), ())
    return found[0] if found else result.id.encode()


@click.command()
@click.argument("sandbox", metavar="ID")
@click.argument("exec_", metavar="EXEC")
@click.option(
    "-s",
    "--signal",
    "number",
    type=SIGNAL,
    metavar="SIGNAL",
    default=signal.SIGKILL,
    help="As TERM, SIGTERM or 15.  [default: KILL]",
)
@click.option("--all", "everyone", is_flag=True, help="To all processes of the command, not only its main one's group.")
@where_options
@json_option
@click.pass_obj
def kill(session: Session, sandbox: str, exec_: str, number: int, everyone: bool, where: Where) -> None:
    """Send a signal to command EXEC of sandbox ID, and print EXEC."""
    node_of(sandbox)
    asyncio.run(_kill(where, sandbox, exec_, number, everyone))
    session.emit({"exec": exec_, "signal": number}) if session.json else click.echo(exec_)


async def _kill(where: Where, id_: str, exec_: str, number: int, everyone: bool) -> None:
    async with open_client(where) as client:
        process = await (await client.get(id_)).attach(exec_)
        try:
            await process.signal(number, everyone=everyone)
        finally:
            process.detach()
