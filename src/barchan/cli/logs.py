"""`barchan logs`: what commands wrote, from the record."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from barchan.cli.connect import Where, open_client, where_options
from barchan.cli.session import Session, json_option
from barchan.cli.text import command_line, plain
from barchan.spec import ExecInfo, node_of

if TYPE_CHECKING:
    from barchan.sdk import ProcessOutput, Sandbox

PAUSE = 0.5
"""Seconds without output after which a running command is not waited for, without --follow."""

Write = Callable[[str, bytes], None]
"""Takes `stdout` or `stderr`, and bytes."""


@click.command()
@click.argument("sandbox", metavar="ID")
@click.option("--exec", "exec_", metavar="EXEC", help="Only this command, as exact bytes on stdout and stderr.")
@click.option("-f", "--follow", is_flag=True, help="Wait for the end of commands that still run.")
@where_options
@json_option
@click.pass_obj
def logs(session: Session, sandbox: str, exec_: str | None, follow: bool, where: Where) -> None:
    """Show what the commands of sandbox ID wrote.

    Of all commands, each line is shown with the command's id, and without control characters.
    """
    node_of(sandbox)
    asyncio.run(_logs(session, where, sandbox, exec_, follow))


async def _logs(session: Session, where: Where, id_: str, exec_: str | None, follow: bool) -> None:
    async with open_client(where) as client:
        sandbox = await client.get(id_)
        if exec_ is not None:
            await _show(sandbox, exec_, follow, _json_writer(session, exec_) if session.json else _raw)
            return
        for info in await sandbox.execs():
            _head(session, info)
            lines = Lines(info.id)
            await _show(sandbox, info.id, follow, _json_writer(session, info.id) if session.json else lines.write)
            lines.end()


def _head(session: Session, info: ExecInfo) -> None:
    if session.json:
        argv = [part.decode("utf-8", "replace") for part in info.argv]
        session.emit(
            {"event": "command", "exec": info.id, "argv": argv, "started": info.started, "result": info.result}
        )
    else:
        how = info.result.outcome if info.result else "running"
        click.echo(f"{plain(info.id)} $ {command_line(info.argv)}  [{how}]")


async def _show(sandbox: Sandbox, exec_: str, follow: bool, write: Write) -> None:
    process = await sandbox.attach(exec_)
    try:
        await asyncio.gather(
            _copy(process.stdout, "stdout", follow, write), _copy(process.stderr, "stderr", follow, write)
        )
    finally:
        process.detach()


async def _copy(output: ProcessOutput, name: str, follow: bool, write: Write) -> None:
    while True:
        try:
            async with asyncio.timeout(None if follow else PAUSE):
                data = await output.read()
        except TimeoutError:
            return
        if not data:
            return
        write(name, data)


def _raw(name: str, data: bytes) -> None:
    stream = sys.stdout if name == "stdout" else sys.stderr
    stream.buffer.write(data)
    stream.buffer.flush()


def _json_writer(session: Session, exec_: str) -> Write:
    def write(name: str, data: bytes) -> None:
        text = base64.b64encode(data).decode()
        session.emit({"event": "output", "exec": exec_, "stream": name, "base64": text})

    return write


class Lines:
    """Cuts two streams into lines, each behind the command's id. A line is cut at 64 KiB."""

    MOST = 1 << 16

    def __init__(self, exec_: str) -> None:
        self._marks = {"stdout": f"{plain(exec_)} |", "stderr": f"{plain(exec_)} !"}
        self._rest = {"stdout": b"", "stderr": b""}

    def write(self, name: str, data: bytes) -> None:
        *lines, rest = (self._rest[name] + data).split(b"\n")
        while len(rest) > self.MOST:
            lines.append(rest[: self.MOST])
            rest = rest[self.MOST :]
        self._rest[name] = rest
        for line in lines:
            self._print(name, line)

    def end(self) -> None:
        for name, rest in self._rest.items():
            if rest:
                self._print(name, rest)

    def _print(self, name: str, line: bytes) -> None:
        print(f"{self._marks[name]} {plain(line)}")
