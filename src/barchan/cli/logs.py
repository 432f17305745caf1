"""`barchan logs`: what commands wrote, from the record."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import click

from barchan.cli.connect import Where, open_client, where_options
from barchan.cli.session import Session, json_option
from barchan.cli.text import command_line, plain, plain_lines
from barchan.errors import BarchanError, RecordGone
from barchan.spec import ExecInfo, node_of

if TYPE_CHECKING:
    from barchan.sdk import ProcessOutput, Sandbox

Write = Callable[[str, bytes], None]
"""Takes `stdout` or `stderr`, and bytes."""


class Most(NamedTuple):
    """How many bytes are shown of each output."""

    stdout: int
    stderr: int


@click.command()
@click.argument("sandbox", metavar="ID")
@click.option("--exec", "exec_", metavar="EXEC", help="Only this command, as exact bytes on stdout and stderr.")
@click.option("-f", "--follow", is_flag=True, help="Wait for the end of commands that still run.")
@where_options
@json_option
@click.pass_obj
def logs(session: Session, sandbox: str, exec_: str | None, follow: bool, where: Where) -> int:
    """Show what the commands of sandbox ID wrote, also when it has ended.

    Of all commands, each line is shown with the command's id, and without control characters. The exit code is 1 when a part
    of it is not in the log any more: the oldest records go when the log has reached its size.
    """
    node_of(sandbox)
    return asyncio.run(_logs(session, where, sandbox, exec_, follow))


async def _logs(session: Session, where: Where, id_: str, exec_: str | None, follow: bool) -> int:
    async with open_client(where) as client:
        sandbox = await client.get(id_)
        if exec_ is not None:
            info = next((info for info in await sandbox.execs(partial=True) if info.id == exec_), None)
            writer = _json_writer(session, exec_) if session.json else _raw
            if info is None:  # not in the list yet, or an error
                await _show(sandbox, exec_, None, writer)
                return 0
            return int(not await _show_kept(session, sandbox, info, None if follow else _most(info), writer))
        whole, infos = await _commands(session, sandbox)
        for info in infos:
            _head(session, info)
            lines = Lines(info.id)
            write = _json_writer(session, info.id) if session.json else lines.write
            whole &= await _show_kept(session, sandbox, info, None if follow else _most(info), write)
            lines.end()
        return int(not whole)


async def _commands(session: Session, sandbox: Sandbox) -> tuple[bool, tuple[ExecInfo, ...]]:
    """Those that are still on record, and whether they are all. If not, that is said."""
    try:
        return True, await sandbox.execs()
    except RecordGone as error:
        session.report(error)
        return False, await sandbox.execs(partial=True)


async def _show_kept(session: Session, sandbox: Sandbox, info: ExecInfo, most: Most | None, write: Write) -> bool:
    """Of one that has ended, also when nobody knows how. False when a part of it is gone, which is said."""
    try:
        await _show(sandbox, info.id, most, write)
    except RecordGone as error:
        session.report(error)
        return False
    except BarchanError:
        if info.result is None or info.result.error is None:
            raise
    return True


def _most(info: ExecInfo) -> Most | None:
    """A command that runs may write faster than anybody reads: what is on record now is what it wrote so far."""
    return None if info.result else Most(info.stdout_recorded, info.stderr_recorded)


def _head(session: Session, info: ExecInfo) -> None:
    if session.json:
        argv = [part.decode("utf-8", "replace") for part in info.argv]
        command = {"exec": info.id, "argv": argv, "shell": info.shell, "started": info.started, "result": info.result}
        session.emit({"event": "command", **command})
    else:
        how = info.result.outcome if info.result else "running"
        click.echo(f"{plain(info.id)} $ {command_line(info.argv)}  [{how}]")


async def _show(sandbox: Sandbox, exec_: str, most: Most | None, write: Write) -> None:
    process = await sandbox.attach(exec_)
    out, err = most or (None, None)
    try:
        await asyncio.gather(_copy(process.stdout, "stdout", out, write), _copy(process.stderr, "stderr", err, write))
    finally:
        process.detach()


async def _copy(output: ProcessOutput, name: str, most: int | None, write: Write) -> None:
    """All of it, or its first `most` bytes."""
    left = sys.maxsize if most is None else most
    while left > 0 and (data := await output.read()):
        write(name, data[:left])
        left -= len(data)


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
        self._marks = {"stdout": f"{plain(exec_)} | ", "stderr": f"{plain(exec_)} ! "}
        self._rest = {"stdout": bytearray(), "stderr": bytearray()}

    def write(self, name: str, data: bytes) -> None:
        rest = self._rest[name]
        if (end := data.rfind(b"\n")) >= 0:
            self._print(name, bytes(rest) + data[:end])
            rest[:] = data[end + 1 :]
        else:
            rest += data
        while len(rest) > self.MOST:
            self._print(name, bytes(rest[: self.MOST]))
            del rest[: self.MOST]

    def end(self) -> None:
        for name, rest in self._rest.items():
            if rest:
                self._print(name, bytes(rest))

    def _print(self, name: str, lines: bytes) -> None:
        """All at once: there may be millions of them."""
        mark = self._marks[name]
        sys.stdout.write(mark + plain_lines(lines).replace("\n", f"\n{mark}") + "\n")
