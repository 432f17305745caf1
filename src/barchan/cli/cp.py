"""`barchan cp`: files and trees, either way."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from barchan.cli.connect import Where, open_client, where_options
from barchan.cli.output import failure
from barchan.cli.progress import bytes_bar
from barchan.cli.session import Session, json_option
from barchan.cli.text import plain
from barchan.errors import FileFailure, FileIsDirectory, FileMissing, FileNotDirectory, InvalidRequest
from barchan.spec import node_of

if TYPE_CHECKING:
    from barchan.sdk import Sandbox, TransferReport
    from barchan.sdk._tree import SkipReason


class Remote(NamedTuple):
    sandbox: str
    path: bytes


@click.command()
@click.argument("source", metavar="SRC", type=click.UNPROCESSED)
@click.argument("target", metavar="DST", type=click.UNPROCESSED)
@click.option("-u", "--user", metavar="USER", help="Act as this user of the sandbox.")
@click.option("-v", "--verbose", is_flag=True, help="Name everything that is skipped.")
@where_options
@json_option
@click.pass_obj
def cp(session: Session, source: str, target: str, user: str | None, verbose: bool, where: Where) -> int:
    """Copy a file or a tree from or to a sandbox.

    One of SRC and DST is ID:PATH. A DST that is a directory, or ends in '/', gets the copy inside it under its own name.
    '-' is standard input or output, for one file. Missing directories are made in the sandbox, never on this host.

    FIFOs, sockets and devices are skipped; on this host, so are links that lead out of the tree: absolute ones, and those
    with too many '..'. What USER may not read is skipped too, and then the exit code is 1.
    """
    import asyncio

    if session.json and target == "-":
        raise InvalidRequest("json: standard output is the file", field="json")
    report = asyncio.run(_copy(where, source, target, user))
    if session.json:
        skipped = [{"path": path.decode("utf-8", "replace"), "reason": why} for path, why in report.skipped.items()]
        more = {"skipped_more": report.skipped_more} if report.skipped_more else {}
        session.emit({"files": report.files, "bytes": report.bytes, "skipped": skipped, **more})
    else:
        for line in skip_notes(report, verbose):
            session.note(f"barchan: {line}")
    return 1 if "unreadable" in {*report.skipped.values(), *report.skipped_more} else 0


SKIPPED: dict[SkipReason, tuple[str, str]] = {
    "link_out": ("link that leads out of the tree", "links that lead out of the tree"),
    "special": ("FIFO, socket or device", "FIFOs, sockets or devices"),
    "unreadable": ("may not be read", "more that may not be read"),
}
"""Why: of one, and of several."""
NAMED = 10
"""Of what could not be read, so many are named unasked."""


def skip_notes(report: TransferReport, verbose: bool) -> Iterator[str]:
    """What was left out: the harmless counted, what could not be read named; with `verbose`, all named."""
    for reason, (one, several) in SKIPPED.items():
        paths = [path for path, why in report.skipped.items() if why == reason]
        named = len(paths) if verbose else NAMED if reason == "unreadable" else 0
        for path in paths[:named]:
            yield f"skipped {plain(path)}: {one}"
        left = max(len(paths) - named, 0) + report.skipped_more.get(reason, 0)
        if left > 0:
            yield f"{left} {several if left > 1 else one} skipped{'' if verbose else ' (-v names all)'}"


def parse_side(text: str) -> Remote | None:
    """`ID:PATH` of a sandbox; None for a local path, which may hold ':' as `./a:b`."""
    sandbox, colon, path = text.partition(":")
    if not colon or "/" in sandbox:
        return None
    node_of(sandbox)
    if not path:
        raise InvalidRequest(f"{text!r} names no path", hint="for the root, write ID:/")
    return Remote(sandbox, os.fsencode(path))


async def _copy(where: Where, source: str, target: str, user: str | None) -> TransferReport:
    there, here = parse_side(source), parse_side(target)
    if (there is None) == (here is None):
        raise InvalidRequest("exactly one of SRC and DST must be in a sandbox", hint="write it as ID:PATH")
    try:
        async with open_client(where) as client:
            sandbox = await client.get((there or here or Remote("", b"")).sandbox)
            if there is not None:
                return await _fetch(sandbox, there.path, target, user)
            assert here is not None
            if source == "-":
                return await _from_stdin(sandbox, here.path, user)
            return await _upload(sandbox, Path(source), here.path, user)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise local_failure(error) from error


def local_failure(error: OSError) -> FileFailure:
    """An error of a file on this host, in our tree."""
    kinds: dict[type[OSError], type[FileFailure]] = {
        FileNotFoundError: FileMissing,
        IsADirectoryError: FileIsDirectory,
        NotADirectoryError: FileNotDirectory,
    }
    name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else "local file"
    return kinds.get(type(error), FileFailure)(f"{name}: {error.strerror}", hint="on this host")


async def _upload(sandbox: Sandbox, source: Path, target: bytes, user: str | None) -> TransferReport:
    if target.endswith(b"/") or await _is_directory(sandbox, target, user):
        target = os.path.join(target, os.fsencode(source.absolute().name))
    with bytes_bar() as progress:
        return await sandbox.files.upload(source, target, user=user, progress=progress)


async def _from_stdin(sandbox: Sandbox, target: bytes, user: str | None) -> TransferReport:
    from barchan.cli.descriptors import Input
    from barchan.sdk import TransferReport

    if target.endswith(b"/") or await _is_directory(sandbox, target, user):
        raise FileIsDirectory(f"{plain(target)} is a directory", hint="standard input has no name: give DST one")
    count = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal count
        try:
            while data := await source.read():
                count += len(data)
                yield data
        except OSError as error:
            raise failure(0, error) from error

    source = Input(0)
    await sandbox.files.write(target, pieces(), user=user)
    return TransferReport(files=1, bytes=count)


async def _is_directory(sandbox: Sandbox, path: bytes, user: str | None) -> bool:
    try:
        return (await sandbox.files.stat(path, user=user)).kind == "directory"
    except FileMissing:
        return False


async def _fetch(sandbox: Sandbox, source: bytes, target: str, user: str | None) -> TransferReport:
    if target == "-":
        return await _to_stdout(sandbox, source, user)
    return await _download(sandbox, source, Path(target), target.endswith("/"), user)


async def _to_stdout(sandbox: Sandbox, source: bytes, user: str | None) -> TransferReport:
    from barchan.cli.descriptors import Output
    from barchan.sdk import TransferReport

    found = await sandbox.files.stat(source, user=user)
    if found.kind != "file":
        kind = FileIsDirectory if found.kind == "directory" else FileFailure
        raise kind(f"{plain(source)} is no file", hint="only one file can go to standard output")
    output, count = Output(1), 0
    async for data in sandbox.files.read_stream(source, user=user):
        await output.write(data)
        count += len(data)
    return TransferReport(files=1, bytes=count)


async def _download(sandbox: Sandbox, source: bytes, target: Path, inside: bool, user: str | None) -> TransferReport:
    await sandbox.files.stat(source, user=user)  # so that nothing is said of this side when it is missing there
    if inside or target.is_dir():
        target = target / local_name(source)
    if not target.parent.is_dir():
        kind = FileNotDirectory if target.parent.exists() else FileMissing
        raise kind(f"{target.parent}: no such directory", hint="on this host")
    with bytes_bar() as progress:
        return await sandbox.files.download(source, target, user=user, progress=progress)


def local_name(source: bytes) -> str:
    """The last component; refuses one that means another place here."""
    name = source.rstrip(b"/").rpartition(b"/")[2]
    if name in (b"", b".", b".."):
        raise InvalidRequest(f"{plain(source)} has no name to copy it under", hint="give DST a name")
    return os.fsdecode(name)
