"""`barchan stats`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from barchan.cli.connect import Where, open_client, where_options
from barchan.cli.session import Session, json_option
from barchan.cli.text import span
from barchan.cli.values import SECONDS
from barchan.errors import BarchanError, SandboxStopped, SandboxUnavailable
from barchan.sizes import size
from barchan.spec import node_of
from barchan.usage import SandboxStats

if TYPE_CHECKING:
    from rich.table import Table

    from barchan.sdk import Client

AT_ONCE = 32
HEAD = ("id", ">memory", ">peak", ">cpu", ">cpu %", ">procs", ">threads", ">disk", ">age")
SPARE = (">peak", ">threads", ">age", ">cpu", ">procs", ">disk")
"""What a narrow terminal does not show, the first named first."""


@click.command()
@click.argument("sandboxes", metavar="[ID...]", nargs=-1)
@click.option(
    "--watch", is_flag=True, help="Again and again, until interrupted. On a terminal the table stays in its place."
)
@click.option("--every", type=SECONDS, metavar="S", default=2.0, show_default=True, help="With --watch.")
@where_options
@json_option
@click.pass_obj
def stats(session: Session, sandboxes: tuple[str, ...], watch: bool, every: float, where: Where) -> int:
    """What sandboxes use: memory, CPU time, processes, disk. Without ID, all that live.

    `cpu` is seconds since its creation, `cpu %` of one CPU since the line before, or since its creation.
    Looking does not count as use. A narrow terminal shows fewer columns.
    """
    for sandbox in sandboxes:
        node_of(sandbox)
    return asyncio.run(_show(session, where, sandboxes, every if watch else None))


async def _show(session: Session, where: Where, sandboxes: tuple[str, ...], every: float | None) -> int:
    async with open_client(where) as client:
        found, errors = await measure(client, sandboxes)
        for error in errors:
            session.report(error)
        if every is not None and sys.stdout.isatty() and not session.json:
            await _live(client, sandboxes, every, found)
        _print(session, found, {})
        while every is not None:
            before = {one.id: one for one in found}
            await asyncio.sleep(every)
            found, _ = await measure(client, sandboxes)
            _print(session, found, before)
    return 1 if errors else 0


async def measure(client: Client, sandboxes: Sequence[str]) -> tuple[list[SandboxStats], list[BarchanError]]:
    """Of those that were named, or of all. Without names, one that ends meanwhile is left out."""
    ids = sandboxes or [info.id for info in await client.list(states=["ready"])]
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(id: str) -> SandboxStats | BarchanError:
        async with turn:
            try:
                return await (await client.get(id)).stats()
            except BarchanError as error:
                return error

    answers = await asyncio.gather(*(one(id) for id in ids))
    errors = [answer for answer in answers if isinstance(answer, BarchanError)]
    if not sandboxes:
        errors = [error for error in errors if not isinstance(error, (SandboxStopped, SandboxUnavailable))]
    return [answer for answer in answers if isinstance(answer, SandboxStats)], errors


def _print(session: Session, found: list[SandboxStats], before: dict[Any, SandboxStats]) -> None:
    from barchan.cli.tables import show

    if session.json:
        for one in found:
            session.emit(one)
    else:
        show(HEAD, [row(one, before.get(one.id)) for one in found], SPARE)


def row(now: SandboxStats, before: SandboxStats | None = None) -> tuple[str, ...]:
    """For the table."""
    seconds = now.cpu_user + now.cpu_system
    used, passed = seconds, now.at - now.since
    if before is not None:
        used, passed = seconds - before.cpu_user - before.cpu_system, now.at - before.at
    share = 100 * used / passed if passed > 0 else 0.0
    peak = size(now.memory_peak) if now.memory_peak is not None else ""
    counts = (str(now.processes), str(now.pids))
    return (
        now.id,
        size(now.memory),
        peak,
        f"{seconds:.1f} s",
        f"{share:.0f}",
        *counts,
        size(now.disk),
        span(now.at - now.since),
    )


async def _live(client: Client, sandboxes: tuple[str, ...], every: float, found: list[SandboxStats]) -> None:
    """On a terminal the table stays in its place. Ends with an interrupt."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    before: dict[Any, SandboxStats] = {}
    with Live(_table(found, before, console.width), console=console, auto_refresh=False) as live:
        while True:
            before = {one.id: one for one in found}
            await asyncio.sleep(every)
            found, _ = await measure(client, sandboxes)
            live.update(_table(found, before, console.width), refresh=True)


def _table(found: list[SandboxStats], before: dict[Any, SandboxStats], width: int) -> Table:
    from barchan.cli.tables import fitted, table

    return table(*fitted(HEAD, [row(one, before.get(one.id)) for one in found], width, SPARE))
