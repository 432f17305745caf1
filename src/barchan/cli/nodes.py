"""`barchan nodes`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from barchan.cli.connect import Where, open_client, where_options
from barchan.cli.session import Session, json_option
from barchan.sizes import size

if TYPE_CHECKING:
    from barchan.spec import NodeInfo

HEAD = ("node", ">sandboxes", ">memory promised", ">disk promised", ">cpus", ">pool", ">hits", ">misses", "kernel")
SPARE = ("kernel", ">cpus", ">misses", ">hits", ">pool")
"""What a narrow terminal does not show, the first named first."""


@click.command()
@where_options
@json_option
@click.pass_obj
def nodes(session: Session, where: Where) -> None:
    """What each node has, and how much of it is promised to sandboxes.

    Memory and disk: the sum of the sandboxes' limits, and how much may be promised in all, which is more than there is
    (`barchan up --memory-overcommit`, `--disk-overcommit`). `pool` is how many containers stand ready for the next requests,
    `hits` and `misses` are requests that found one and that did not, since the node's agent started.
    """
    import asyncio

    from barchan.cli.tables import show

    found = asyncio.run(_nodes(where))
    if session.json:
        session.emit(found)
        return
    show(HEAD, [row(info) for info in found], SPARE)
    for info in found:
        for note in info.notes:
            session.note(f"note: {info.name}: {note}")


async def _nodes(where: Where) -> tuple[NodeInfo, ...]:
    async with open_client(where) as client:
        return await client.nodes()


def row(info: NodeInfo) -> tuple[str, ...]:
    """For the table."""
    pool = info.pool
    return (
        info.name,
        f"{info.sandboxes} of {info.capacity}",
        f"{size(info.memory_promised)} of {size(info.memory_total)}",
        f"{size(info.disk_promised)} of {size(info.disk_total)}",
        str(info.cpus_total or ""),
        str(pool.ready + pool.parked),
        str(pool.hits + pool.parked_hits),
        str(pool.misses),
        info.kernel,
    )
